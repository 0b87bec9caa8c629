"""The charts of a report."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from server.experiment.analysis.result import Result
from server.experiment.report.axis import Axis, short
from server.experiment.report.chart import BOTTOM, LEFT, RIGHT, TOP, WIDTH, Chart


def effect_chart(result: Result) -> str:
    """The interval that the verdict rests on, against no change and against changes that do not matter."""
    low, high = result.decided_by
    ratio = result.primary.ratio
    if low is None or high is None or ratio is None:
        return ""
    margin = result.min_effect
    axis = Axis([low, high, ratio, 1 / (1 + margin), 1 + margin, 0.97, 1.03], 14, WIDTH - 14, logarithmic=True)
    left, right = axis.at(1 / (1 + margin)), axis.at(1 + margin)
    parts = [f'<rect class="margin" x="{left:.1f}" y="6" width="{right - left:.1f}" height="42"/>']
    parts.append(f'<line class="zero" x1="{axis.at(1):.1f}" x2="{axis.at(1):.1f}" y1="6" y2="48"/>')
    parts.append(f'<line class="whisker" x1="{axis.at(low):.1f}" x2="{axis.at(high):.1f}" y1="27" y2="27"/>')
    parts.append(f'<circle class="dot whisker" cx="{axis.at(ratio):.1f}" cy="27" r="5"/>')
    parts += [f'<text class="mid" x="{axis.at(value):.1f}" y="64">{short(value)}</text>' for value in axis.ticks()]
    label = f"Ratio of {result.primary.label}, treatment to control: {ratio:.3f}, between {low:.3f} and {high:.3f}"
    return f'<svg viewBox="0 0 {WIDTH} 70" role="img" aria-label="{escape(label, quote=True)}">{"".join(parts)}</svg>'


def distribution_chart(result: Result) -> str:
    """Both distribution functions with their bands."""
    curves = result.curves
    values = [*curves.ecdf_a, *curves.ecdf_b]
    if not values:
        return ""
    x = Axis(values, LEFT, RIGHT, logarithmic=True)
    chart = Chart("Distributions of both arms", x, Axis([0.0, 1.0], BOTTOM, TOP), _named(result), "share at or below")
    for ecdf, band, kind in ((curves.ecdf_a, curves.bands[0], "a"), (curves.ecdf_b, curves.bands[1], "b")):
        points = [(value, (i + 1) / len(ecdf)) for i, value in enumerate(ecdf)]
        chart.band([(v, max(0, p - band)) for v, p in points], [(v, min(1, p + band)) for v, p in points], kind)
        chart.steps(points, kind)
    return chart.svg()


def difference_chart(result: Result) -> str:
    """By how much each quantile moved, with an interval for each."""
    curves = result.curves
    if len(curves.at) < 2:
        return ""
    low, high = ([bound or 0.0 for bound in side] for side in zip(*curves.difference_bounds, strict=True))
    y = Axis([*low, *high, 0.0], BOTTOM, TOP)
    x = Axis([100 * p for p in curves.at], LEFT, RIGHT)
    unit = f", {result.primary.unit}" if result.primary.unit else ""
    chart = Chart("Difference by quantile", x, y, "quantile, %", f"treatment - control{unit}")
    at = [100 * p for p in curves.at]
    chart.band(list(zip(at, low, strict=True)), list(zip(at, high, strict=True)), "b")
    chart.level(0)
    chart.line(list(zip(at, curves.differences, strict=True)), "b")
    return chart.svg()


def timeline_chart(result: Result) -> str:
    """Medians of both arms over time."""
    timeline = result.curves.timeline
    if len(timeline) < 2:
        return ""
    values = [v for _, a, b in timeline for v in (a, b) if v is not None]
    x, y = Axis([at for at, _, _ in timeline], LEFT, RIGHT), Axis([0.0, *values], BOTTOM, TOP)
    chart = Chart("Medians over time", x, y, "seconds since the start", f"median {_named(result)}")
    for index, kind in ((1, "a"), (2, "b")):
        points = [(row[0], value) for row in timeline if (value := row[index]) is not None]
        chart.line(points, f"{kind} thin")
        chart.dots(points, kind)
    return chart.svg()


def acceptance_chart(result: Result) -> str:
    """How many draft tokens verify steps accepted, as shares of an arm's steps."""
    shares = [_shares(arm.accepted) for arm in result.arms]
    longest = max(map(len, shares))
    if longest < 2:
        return ""
    x = Axis([0.0, longest - 1.0], LEFT + 14, RIGHT - 14)
    y = Axis([0.0, *shares[0], *shares[1]], BOTTOM, TOP)
    chart = Chart("Accepted draft tokens per step", x, y, "accepted draft tokens in a step", "share of steps")
    width = min(12.0, 0.38 * (RIGHT - LEFT) / longest)
    for index, kind in ((0, "a"), (1, "b")):
        for k, share in enumerate(shares[index]):
            chart.bar(k, -width if index == 0 else 0.0, width, share, kind)
    return chart.svg()


def _shares(counts: Sequence[int]) -> list[float]:
    total = sum(counts)
    return [count / total for count in counts] if total else []


def _named(result: Result) -> str:
    unit = f", {result.primary.unit}" if result.primary.unit else ""
    return f"{result.primary.label.partition('@')[0].removesuffix(':mean')}{unit}"
