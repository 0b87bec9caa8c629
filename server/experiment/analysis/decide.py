"""Turns intervals into a verdict in words."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from server.experiment.analysis.guardrail_result import GuardrailResult
from server.experiment.analysis.target_result import TargetResult
from server.experiment.analysis.verdict import Verdict, VerdictKind
from server.experiment.stats.equivalence import equivalent
from server.experiment.stats.interval import Interval


def decide(
    primary: TargetResult,
    ratio: Callable[[float], Interval],
    min_effect: float,
    alpha: float,
    min_units: int,
    invalid: Sequence[str],
    guardrails: Sequence[GuardrailResult],
) -> Verdict:
    """``ratio`` gives the interval for B / A of the primary metric at a level.

    Anything in ``invalid`` overrules all; a broken guardrail overrules the metric. Equivalence comes before a
    difference: one that is sure but smaller than ``min_effect`` is no reason to choose.
    """
    if invalid:
        return Verdict(
            kind="invalid",
            headline="Invalid: " + invalid[0] + ".",
            reasons=tuple(f"And {reason}." for reason in invalid[1:]),
        )
    interval = ratio(alpha)
    effect = _effect(primary, interval, alpha)
    broken = [g for g in guardrails if g.state == "broken"]
    reasons = [effect, *(f"Guardrail {g.label} is {g.state}: {g.text}." for g in guardrails if g.state != "held")]
    if broken:
        names = ", ".join(g.label for g in broken)
        headline = f"Worse: the treatment breaks the guardrail {names}."
        return Verdict(kind="worse", headline=headline, reasons=tuple(reasons))
    if primary.units < min_units:
        headline = f"Undecided: {primary.units} units are too few, {min_units} are the least."
        return Verdict(kind="undecided", headline=headline, reasons=tuple(reasons))
    kind = _kind(ratio, interval, primary.lower_is_better, min_effect, alpha)
    return Verdict(kind=kind, headline=_headline(kind, primary, min_effect), reasons=tuple(reasons))


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


def _headline(kind: VerdictKind, primary: TargetResult, min_effect: float) -> str:
    name = primary.label
    change = "" if primary.ratio is None else f" by {abs(primary.ratio - 1):.1%}"
    moved = "lower" if primary.ratio is not None and primary.ratio < 1 else "higher"
    if kind == "equivalent":
        return f"Equivalent: {name} differs by less than {min_effect:.1%}."
    if kind == "undecided":
        return f"Undecided: {name} may be equal in both arms, and may differ by {min_effect:.1%} or more."
    return f"{kind.capitalize()}: the treatment's {name} is {moved}{change}."


def _effect(primary: TargetResult, interval: Interval, alpha: float) -> str:
    if primary.a is None or primary.b is None:
        return f"No request has {primary.label}."
    unit = f" {primary.unit}" if primary.unit else ""
    return (
        f"{primary.label}: control {primary.a:.4g}{unit}, treatment {primary.b:.4g}{unit}; their ratio lies between "
        f"{interval.low:.3f} and {interval.high:.3f} at {1 - alpha:.0%}."
    )
