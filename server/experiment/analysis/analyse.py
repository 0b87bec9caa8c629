"""The whole analysis: a folder's plan and records in, a result out."""

from __future__ import annotations

from collections import Counter
from itertools import zip_longest

import numpy as np

from server.experiment.analysis.arm_result import ArmResult
from server.experiment.analysis.checks import (
    SAMPLE_RATIO_LIMIT,
    Outputs,
    SampleRatio,
    compare_outputs,
    sample_ratio,
    slip_ms,
)
from server.experiment.analysis.curves import Curves
from server.experiment.analysis.decide import decide
from server.experiment.analysis.guardrails import check_guardrails
from server.experiment.analysis.make_curves import CURVE_CHANCES, make_curves
from server.experiment.analysis.result import Result
from server.experiment.analysis.selection import Selection, select
from server.experiment.analysis.target_result import TargetResult
from server.experiment.analysis.targets import bounds, compare_target, quantile_result, quantiles_of
from server.experiment.config.experiment_config import ExperimentConfig
from server.experiment.experiment_errors import ExperimentError
from server.experiment.manifest import Manifest
from server.experiment.record_log import RecordLog
from server.experiment.stats.holm import holm

_TABLE_METRICS = ("ttft_ms", "tpot_ms", "e2e_ms", "queue_ms")
_TABLE_QUANTILES = [0.5, 0.9, 0.95, 0.99, 0.999]
_SEED = 20250101


def analyse(manifest: Manifest, log: RecordLog) -> Result:
    """Repeatable: the bootstrap's seed is fixed.

    Raises:
        ExperimentError: an arm has no record to analyse.
    """
    config = manifest.config
    rng = np.random.default_rng(_SEED)
    selection = select(config, log.records)
    for name, records in zip(config.arms, selection.records, strict=True):
        if not records:
            raise ExperimentError(f"arm {name!r} has no record to analyse; look at `warmup_requests` and at the run")
    stopping = config.stopping
    primary, ratio = compare_target(selection, config.primary, stopping, config.covariate, rng)
    secondary = [
        compare_target(selection, target, stopping, config.covariate, rng).result for target in config.secondary
    ]
    adjusted = holm([target.p_value for target in secondary])
    table, curves = _table(selection, config, rng)
    guardrails = check_guardrails(selection, config, rng)
    outputs = compare_outputs(selection)
    shares = sample_ratio(selection, config)
    problems = _problems(selection, config, outputs, shares)
    verdict = decide(
        primary, ratio, config.primary.min_effect, stopping.alpha, stopping.min_units, problems, guardrails
    )
    first, second = (_arm(selection, config, index) for index in (0, 1))
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
        at = _TABLE_QUANTILES + (list(CURVE_CHANCES) if metric == config.primary.metric else [])
        sample, compared, merged = quantiles_of(selection, metric, at, rng)
        if not all(sample.sizes):
            continue
        found = [quantile_result(metric, sample, one, merged, alpha) for one in compared[: len(_TABLE_QUANTILES)]]
        rows += [row for row in found if row.label.endswith("@p50") or row.ratio_bounds[1] is not None]
        if metric == config.primary.metric:
            curves = make_curves(selection, metric, sample, compared[len(_TABLE_QUANTILES) :], alpha)
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
        found.append(f"the arms did not get their shares ({a} against {b} {shares.unit}s, p = {shares.p_value:.2g})")
    slip = slip_ms(selection)
    if slip is not None and slip > config.stopping.max_slip_ms:
        found.append(
            f"the load generator lagged: 1 % of requests left {slip:.1f} ms late or more, "
            f"{config.stopping.max_slip_ms:g} ms are allowed"
        )
    return found


def _notes(
    selection: Selection, config: ExperimentConfig, log: RecordLog, outputs: Outputs, merged: int
) -> tuple[str, ...]:
    notes = [f"records {what} left out: {count}" for what, count in selection.left_out.items() if count]
    if log.repeated:
        notes.append(f"records not counted, as their request already had one: {log.repeated}")
    if log.lost_bytes:
        notes.append(f"{log.lost_bytes} bytes behind the last complete record of a file could not be read")
    if config.assignment.pairs:
        lost = selection.n_units - selection.sample("e2e_ms").n_units
        if lost:
            notes.append(f"pairs left out of the latencies, as they did not end well in both arms: {lost}")
        if config.assignment.expect_same_tokens and not outputs.compared:
            notes.append("equality of tokens could not be checked: no pair has token hashes in both arms")
    if config.assignment.mode == "hash":
        notes.append("both arms shared one engine: what one arm costs the other is part of the difference")
    if merged > 1:
        what = f"{merged} consecutive {selection.unit_name}s"
        notes.append(f"{what} depend on each other and were taken as one; with few of them, that may not suffice")
    if config.stopping.rule == "always_valid":
        notes.append("the verdict holds whenever you look; the other intervals hold at one look only")
    return tuple(notes)


def _arm(selection: Selection, config: ExperimentConfig, index: int) -> ArmResult:
    name = list(config.arms)[index]
    arm = config.arms[name]
    records = selection.records[index]
    settings = {f"request.{k}": str(v) for k, v in arm.request.items()}
    settings |= {f"engine.{k}": str(v) for k, v in arm.engine.items()}
    if arm.url:
        settings["url"] = arm.url
    return ArmResult(
        name=name,
        settings=settings,
        requests=len(records),
        failed=sum(not r.ok for r in records),
        reasons=dict(Counter(r.status for r in records if not r.ok)),
        tokens=sum(r.tokens for r in records),
        cached_tokens=sum(r.cached_tokens for r in records),
        accepted=tuple(sum(column) for column in zip_longest(*(r.accepted for r in records), fillvalue=0)),
    )
