"""The analysis of an experiment: checks, guardrails, curves and a verdict from a plan and its records."""

from __future__ import annotations

import json
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, Literal, NamedTuple

import numpy as np

from server.experiment.analysis.compare import (
    Selection,
    bounds,
    compare_target,
    number,
    quantile_result,
    quantiles_of,
    select,
)
from server.experiment.analysis.result import (
    ArmResult,
    Curves,
    GuardrailResult,
    Result,
    TargetResult,
    Verdict,
    VerdictKind,
)
from server.experiment.config import QUEUE, Arm, ExperimentConfig, Guardrail
from server.experiment.folder import Manifest
from server.experiment.records import METRICS, ExperimentError, Record, RecordLog
from server.experiment.stats.means import design_effect
from server.experiment.stats.proportions import (
    chi_square_ratio,
    equivalent,
    holm,
    sequential_ratio,
    share_difference,
    share_difference_bounds,
)
from server.experiment.stats.quantiles import band_half_width
from server.experiment.stats.samples import EVERYTHING, Interval, TwoArmSample
from specdec.load.figures import brief, percent

SAMPLE_RATIO_LIMIT = 0.001  # p-value below which the arms' shares invalidate the result


class Outputs(NamedTuple):
    """Pairs whose outputs could be compared, and those that differ."""

    compared: int
    mismatched: list[str]


def compare_outputs(selection: Selection) -> Outputs:
    """Compare the token hashes of each pair of successful requests."""
    a, b = (
        {record.pair: record.token_hash for record in records if record.ok and record.pair and record.token_hash}
        for records in selection.records
    )
    both = [pair for pair in a if pair in b]
    return Outputs(len(both), [pair for pair in both if a[pair] != b[pair]])


class SampleRatio(NamedTuple):
    """Units per arm, and the p-value of these counts under the planned weights."""

    p_value: float
    counts: tuple[int, int]
    unit: str


def sample_ratio(selection: Selection, config: ExperimentConfig) -> SampleRatio:
    """Count what was assigned to an arm as a whole: blocks, keys, or requests."""
    unit = selection.unit_name if selection.unit_name in ("block", "key") else "request"
    first: dict[tuple[int, str], float] = {}
    for arm, records in enumerate(selection.records):
        for record in records:
            first.setdefault((arm, str(getattr(record, unit))), record.arrival)
    arms = np.array([arm for arm, _ in sorted(first, key=first.__getitem__)], np.int64)
    a, b = (int(np.count_nonzero(arms == arm)) for arm in (0, 1))
    weights = [1.0, 1.0] if config.assignment.mode == "switchback" else [arm.weight for arm in config.arms.values()]
    if config.stopping.rule == "always_valid" and not config.assignment.pairs:  # pairs go to the arms in turns
        return SampleRatio(sequential_ratio(arms, weights), (a, b), unit)
    return SampleRatio(chi_square_ratio((a, b), weights), (a, b), unit)


def slip_ms(selection: Selection) -> float | None:
    """99th percentile of the requests' delay against their schedule, ms; None without schedule."""
    late = [
        (r.arrival - r.scheduled) * 1e3 for records in selection.records for r in records if r.scheduled is not None
    ]
    return float(np.quantile(late, 0.99, method="inverted_cdf")) if late else None


_NEGLIGIBLE_QUEUE_MS = 2.0  # guardrails ignore shorter waits, whatever their ratio: a step takes longer


def check_guardrail(
    guardrail: Guardrail, selection: Selection, config: ExperimentConfig, rng: np.random.Generator
) -> GuardrailResult:
    target = guardrail.target
    if target is None:
        failed = selection.failures()
        hits, n = (int(failed.values[0].sum()), int(failed.values[1].sum())), failed.sizes
        each = design_effect(failed.merged(selection.turn))  # requests of a session or a turn may all fail together
        always = config.stopping.rule == "always_valid"
        increase = (share_difference_bounds if always else share_difference)(
            (hits[0] / each, hits[1] / each), (n[0] / each, n[1] / each), config.stopping.alpha
        )
        seen = hits[1] / n[1] - hits[0] / n[0] if all(n) else 0.0
        text = f"{hits[0]} of {n[0]} requests failed in the control, {hits[1]} of {n[1]} in the treatment"
        return _judged(guardrail, seen, increase, text)
    compared = compare_target(selection, target, config.stopping, rng)
    result = compared.result
    if result.a is None or result.b is None:
        return _judged(guardrail, None, EVERYTHING, "no request has this metric")
    unit = f" {result.unit}" if result.unit else ""
    text = f"{brief(result.a)}{unit} in the control, {brief(result.b)}{unit} in the treatment"
    interval = compared.ratio(config.stopping.alpha)
    # A few short waits say nothing of a tail: the treatment's whole interval must be negligible.
    if target.metric == "queue_ms" and result.a * max(1.0, interval.high) < _NEGLIGIBLE_QUEUE_MS:
        return _judged(guardrail, 0.0, Interval(0.0, 0.0), text + ": negligible")

    def increase_of(ratio: float) -> float:
        """The degradation, as a share of the control's value."""
        return ratio - 1 if result.lower_is_better else 1 - ratio

    low, high = sorted(map(increase_of, interval))
    seen_increase = None if result.ratio is None else increase_of(result.ratio)
    return _judged(guardrail, seen_increase, Interval(low, high), text)


def _judged(guardrail: Guardrail, increase: float | None, interval: Interval, text: str) -> GuardrailResult:
    state: Literal["held", "open", "broken"] = "open"
    if interval.high <= guardrail.max_increase:
        state = "held"
    elif interval.low > guardrail.max_increase:
        state = "broken"
    return GuardrailResult(
        label=guardrail.metric,
        state=state,
        limit=guardrail.max_increase,
        increase=None if increase is None else number(increase),
        bounds=bounds(interval),
        text=text,
    )


_POINTS = 200  # of a distribution function, at most
_STRETCHES = 48  # of the timeline


def make_curves(selection: Selection, metric: str, sample: TwoArmSample, alpha: float) -> Curves:
    ecdf_a, ecdf_b = map(_quantiles, sample.values)
    band_a, band_b = (band_half_width(units, alpha) for units in sample.units_by_arm())
    return Curves(ecdf_a=ecdf_a, ecdf_b=ecdf_b, bands=(band_a, band_b), timeline=_timeline(selection, metric))


def _quantiles(values: np.ndarray) -> tuple[float, ...]:
    n = min(_POINTS, len(values))
    return tuple(np.quantile(values, (np.arange(n) + 0.5) / n, method="inverted_cdf").tolist())


def _timeline(selection: Selection, metric: str) -> tuple[tuple[float, float | None, float | None], ...]:
    """Medians of both arms per stretch of time: seconds since the start, control, treatment."""
    value = METRICS[metric].value
    arms = [
        [(record.arrival, found) for record in records if record.ok and math.isfinite(found := value(record))]
        for records in selection.records
    ]
    times = [at for rows in arms for at, _ in rows]
    begin = min(times)
    width = max((max(times) - begin) / _STRETCHES, 1e-9)
    stretches: defaultdict[int, tuple[list[float], list[float]]] = defaultdict(lambda: ([], []))
    for arm, rows in enumerate(arms):
        for at, found in rows:
            stretches[min(_STRETCHES - 1, int((at - begin) / width))][arm].append(found)
    points = []
    for stretch, values in sorted(stretches.items()):
        a, b = (float(np.median(arm)) if arm else None for arm in values)
        points.append(((stretch + 0.5) * width, a, b))
    return tuple(points)


def decide(
    primary: TargetResult,
    ratio: Callable[[float], Interval],
    config: ExperimentConfig,
    invalid: Sequence[str],
    guardrails: Sequence[GuardrailResult],
    unit: str,
) -> Verdict:
    """The verdict. ``ratio`` returns the interval for B / A of the primary metric at a level; ``unit`` is the name of
    what the plan's ``min_units`` counts.

    Anything in ``invalid`` overrules the rest; a broken guardrail overrules the metric. Equivalence is tested before a
    difference: a certain difference below the plan's ``min_effect`` does not matter.
    """
    if invalid:
        others = tuple(f"And {reason}." for reason in invalid[1:])
        return Verdict(kind="invalid", headline=f"Invalid: {invalid[0]}.", reasons=others)
    stopping = config.stopping
    interval = ratio(stopping.alpha)
    reasons = (
        _effect(primary, interval, stopping.alpha, unit),
        *(_explain(each) for each in guardrails if each.state != "held"),
    )
    kind: VerdictKind
    if broken := ", ".join(each.label for each in guardrails if each.state == "broken"):
        kind, headline = "worse", f"Worse: the treatment breaks the guardrail {broken}."
    elif primary.units < stopping.min_units:
        kind = "undecided"
        counted = f"{primary.units} of at least {stopping.min_units}"
        headline = f"Undecided: there are too few {unit}s, {counted} in each arm."
    else:
        kind = _kind(ratio, interval, primary.lower_is_better, config.primary.min_effect, stopping.alpha)
        headline = _headline(kind, primary, interval, config, unit)
    return Verdict(kind=kind, headline=headline, reasons=reasons)


def _kind(
    ratio: Callable[[float], Interval], interval: Interval, lower_is_better: bool, min_effect: float, alpha: float
) -> VerdictKind:
    if equivalent(ratio, min_effect, alpha):
        return "equivalent"
    if interval.high < 1:
        return "better" if lower_is_better else "worse"
    if interval.low > 1:
        return "worse" if lower_is_better else "better"
    return "undecided"


def _explain(guardrail: GuardrailResult) -> str:
    """A sentence about a guardrail that is open or broken."""
    low, high = map(_percent, guardrail.bounds)
    if guardrail.state == "broken":
        meaning = f"it got worse by more than the limit of {percent(guardrail.limit)}"
    else:
        meaning = f"more requests are needed to rule out that it got worse by more than {percent(guardrail.limit)}"
    return f"Guardrail {guardrail.label} is {guardrail.state}: {meaning} ({low} to {high}; {guardrail.text})."


def _percent(change: float | None) -> str:
    return "unknown" if change is None or math.isinf(change) else f"{change:+.1%}"


# What an arm does, and how where its metric is lower and where it is higher.
_PHRASES = {
    "e2e_ms": ("answers", "{} sooner", "{} later"),
    "ttft_ms": ("begins to answer", "{} sooner", "{} later"),
    "tpot_ms": ("takes", "{} less time per token", "{} more time per token"),
    "queue_ms": ("waits in the queue", "{} less", "{} longer"),
    "tokens_per_s": ("writes", "{} fewer tokens per second", "{} more tokens per second"),
    "tokens_per_step": ("gets", "{} fewer tokens per step", "{} more tokens per step"),
}


def _headline(kind: VerdictKind, primary: TargetResult, interval: Interval, config: ExperimentConfig, unit: str) -> str:
    _, arm = config.arms
    metric, _, quantile = primary.label.partition("@")
    metric = metric.removesuffix(":mean")
    at = {"": "on average", "p50": "in the median"}.get(quantile, f"at {quantile}")
    level = f"{percent(1 - config.stopping.alpha)} interval"
    if kind == "equivalent":
        return f"Equivalent: {primary.label} of {arm} differs by less than {percent(config.primary.min_effect)}."
    if primary.ratio is None and primary.a == 0 and primary.b is not None:
        values = f"{primary.label} is 0 in the control and {brief(primary.b)} in {arm}"
        return f"{kind.capitalize()}: {values}, so their ratio is not defined."
    if kind == "undecided" or primary.ratio is None:
        counted = f", of which {primary.merged} in a row count as one" if primary.merged > 1 else ""
        return (
            f"Undecided: the change of {primary.label} is between {_percent(interval.low - 1)} and "
            f"{_percent(interval.high - 1)} ({level}); more {unit}s narrow it{counted}."
        )
    does, less, more = _PHRASES.get(metric, ("has", f"{metric} lower by {{}}", f"{metric} higher by {{}}"))
    shares = sorted(abs(bound - 1) for bound in interval)
    change = (less if primary.ratio < 1 else more).format(f"{abs(primary.ratio - 1):.1%}")
    return f"{kind.capitalize()}: {arm} {does} {change} {at}; {level} {shares[0]:.1%} to {shares[1]:.1%}."


def _effect(primary: TargetResult, interval: Interval, alpha: float, unit: str) -> str:
    if primary.a is None or primary.b is None:
        return f"No request has {primary.label}."
    of = f" {primary.unit}" if primary.unit else ""
    if primary.ratio is None:
        ratio = "their ratio is not defined"
    elif math.isinf(interval.high):
        ratio = f"there are too few {unit}s to bound their ratio"
    else:
        ratio = f"their ratio lies between {interval.low:.3f} and {interval.high:.3f} at {percent(1 - alpha)}"
    return f"{primary.label}: control {brief(primary.a)}{of}, treatment {brief(primary.b)}{of}; {ratio}."


_TABLE_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
_TABLE_QUANTILES = [0.5, 0.9, 0.95, 0.99, 0.999]
_SEED = 20250101


def analyse(manifest: Manifest, log: RecordLog, *, ended: bool = True) -> Result:
    """The result of an experiment; repeatable, because the bootstrap's seed is fixed. ended: False for a look at one
    that runs, which concludes nothing under the rule `fixed`.

    Raises:
        ExperimentError: an arm has no record to analyse.
    """
    config = manifest.config
    rng = np.random.default_rng(_SEED)
    selection = select(config, log.records)
    for name, records in zip(config.arms, selection.records, strict=True):
        if not records:
            raise ExperimentError(f"arm {name!r} has no record to analyse; check `warmup_requests` and the run")
    stopping = config.stopping
    primary, ratio = compare_target(selection, config.primary, stopping, rng)
    one_look = stopping.model_copy(update={"rule": "fixed"})  # only the verdict is valid at any time
    secondary = [compare_target(selection, target, one_look, rng).result for target in config.secondary]
    adjusted = holm([target.p_value for target in secondary])
    table, curves = _table(selection, config, rng)
    guardrails = tuple(check_guardrail(each, selection, config, rng) for each in config.checked_guardrails)
    outputs = compare_outputs(selection)
    # As many first requests of each arm are excluded, whatever the weights: the shares are those before.
    shares = sample_ratio(select(config.model_copy(update={"warmup_requests": 0}), log.records), config)
    problems = _problems(selection, config, outputs, shares)
    verdict = decide(primary, ratio, config, problems, guardrails, selection.unit_name)
    if not ended and stopping.rule == "fixed" and verdict.kind in ("better", "equivalent", "worse"):
        headline = "Undecided: the rule `fixed` concludes once, at the end, and the experiment has not ended."
        verdict = verdict.model_copy(update={"kind": "undecided", "headline": headline})
    first, second = (_arm(*arm, records) for arm, records in zip(config.arms.items(), selection.records, strict=True))
    return Result(
        name=config.name,
        mode=config.assignment.mode,
        rule=stopping.rule,
        alpha=stopping.alpha,
        min_effect=config.primary.min_effect,
        started=manifest.started,
        facts=manifest.facts,
        verdict=verdict,
        primary=primary,
        decided_by=bounds(ratio(stopping.alpha)),
        secondary=tuple(t.model_copy(update={"p_adjusted": p}) for t, p in zip(secondary, adjusted, strict=True)),
        table=table,
        guardrails=guardrails,
        arms=(first, second),
        sample_ratio_p=shares.p_value,
        sample_ratio_counts=shares.counts,
        sample_ratio_unit=shares.unit,
        compared_outputs=outputs.compared,
        mismatched_outputs=len(outputs.mismatched),
        curves=curves,
        notes=_notes(selection, config, log, outputs, primary.merged),
    )


def _table(
    selection: Selection, config: ExperimentConfig, rng: np.random.Generator
) -> tuple[tuple[TargetResult, ...], Curves]:
    """Quantiles of the latencies, and the curves of the primary metric."""
    rows: list[TargetResult] = []
    curves = Curves()
    alpha = config.stopping.alpha
    for metric in dict.fromkeys((config.primary.metric, *_TABLE_METRICS)):
        sample, compared, merged = quantiles_of(selection, metric, _TABLE_QUANTILES, rng)
        if not all(sample.sizes):
            continue
        found = [quantile_result(metric, sample, one, merged, alpha) for one in compared]
        rows += [row for row in found if row.label.endswith("@p50") or row.ratio_bounds[1] is not None]
        if metric == config.primary.metric:
            curves = make_curves(selection, metric, sample.merged(merged), alpha)
    return tuple(rows), curves


def _problems(selection: Selection, config: ExperimentConfig, outputs: Outputs, shares: SampleRatio) -> list[str]:
    found = []
    if config.assignment.expect_same_tokens and config.assignment.pairs and outputs.mismatched:
        named = ", ".join(outputs.mismatched[:3])
        found.append(
            f"{len(outputs.mismatched)} of {outputs.compared} pairs got different tokens in the two arms, "
            f"the first of them {named}"
        )
    if shares.p_value < SAMPLE_RATIO_LIMIT:
        a, b = shares.counts
        found.append(
            f"the arms' shares differ from the plan ({a} against {b} {shares.unit}s, p = {shares.p_value:.2g})"
        )
    slip = slip_ms(selection)
    if slip is not None and slip > config.stopping.max_slip_ms:
        found.append(
            f"the load generator lagged: 1 % of requests were sent {slip:.1f} ms late or more, "
            f"the limit is {config.stopping.max_slip_ms:g} ms"
        )
    return found


def _notes(
    selection: Selection, config: ExperimentConfig, log: RecordLog, outputs: Outputs, merged: int
) -> tuple[str, ...]:
    notes = [f"records excluded, {what}: {count}" for what, count in selection.left_out.items() if count]
    cancelled = [sum(record.cancelled for record in records) for records in selection.records]
    if any(cancelled):
        a, b = cancelled
        notes.append(f"requests that their callers cancelled, no failures: {a} in the control, {b} in the treatment")
    if log.lost_bytes:
        notes.append(f"{log.lost_bytes} bytes behind the last complete record of a file could not be read")
    if config.assignment.pairs:
        lost = selection.n_units - min(selection.sample("e2e_ms").units_by_arm())
        if lost:
            notes.append(f"pairs excluded from the latencies because a request failed or was cancelled: {lost}")
        if config.assignment.expect_same_tokens and not outputs.compared:
            notes.append("equality of tokens was not checked: no pair has token hashes in both arms")
    guarded = (each.target for each in config.checked_guardrails)
    for metric in dict.fromkeys(each.metric for each in (config.primary, *config.secondary, *guarded) if each):
        value = METRICS[metric].value
        a, b = (sum(r.ok and not math.isfinite(value(r)) for r in records) for records in selection.records)
        if a or b:
            notes.append(
                f"answers without {metric}, such as those without text or counted tokens: {a} in the control, "
                f"{b} in the treatment"
            )
    if config.checked_guardrails != config.guardrails:
        notes.append(f"guardrail {QUEUE.metric} was not checked: over HTTP no answer says how long it waited")
    if config.assignment.mode == "hash":
        notes.append("both arms shared one engine: their effect on each other is part of the difference")
    if merged > 1:
        what = f"{merged} consecutive {selection.unit_name}s"
        notes.append(f"{what} ran together or are correlated, and count as one unit; few units may not suffice")
    if config.stopping.rule == "always_valid":
        notes.append("the verdict is valid at any time; the other intervals are valid for one look")
        if config.primary.quantile is not None and selection.unit_name in ("block", "key"):
            unit = selection.unit_name
            notes.append(f"the verdict gives each {unit} equal weight, the tables give each request equal weight")
    return tuple(notes)


def _settings(name: str, value: Any) -> dict[str, str]:
    """A setting, or all in a mapping, by dotted names and as a plan spells them."""
    if isinstance(value, dict):
        return {place: text for key, each in value.items() for place, text in _settings(f"{name}.{key}", each).items()}
    return {name: value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}


def _arm(name: str, arm: Arm, records: list[Record]) -> ArmResult:
    settings = _settings("request", arm.request) | _settings("engine", arm.engine)
    if arm.url:
        settings["url"] = arm.url
    return ArmResult(
        name=name,
        settings=settings,
        requests=len(records),
        failed=sum(r.failed for r in records),
        reasons=dict(Counter(r.status for r in records if r.failed)),
        tokens=sum(r.tokens for r in records),
        cached_tokens=sum(r.cached_tokens for r in records),
        accepted=tuple(sum(column) for column in zip_longest(*(r.accepted for r in records), fillvalue=0)),
    )
