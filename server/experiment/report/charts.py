"""The charts of a report, as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from server.experiment.analysis.result import Result


class Axis:
    """Maps values to pixels, logarithmically if allowed and the range spans more than a factor of 30."""

    def __init__(self, values: Sequence[float], begin: float, end: float, logarithmic: bool = False) -> None:
        """``begin`` and ``end``: pixels of the smallest and the largest value, with a margin at both ends."""
        low, high = min(values), max(values)
        self.logarithmic = logarithmic and low > 0 and high / low > 30
        if self.logarithmic:
            low, high = math.log10(low), math.log10(high)
        room = (high - low) * 0.04 or abs(high) * 0.04 or 1.0
        self._low, self._high = low - room, high + room
        self._begin, self._end = begin, end

    def at(self, value: float) -> float:
        """The value's pixel, clipped to the axis."""
        if self.logarithmic:
            value = math.log10(value) if value > 0 else self._low
        part = (value - self._low) / (self._high - self._low)
        return self._begin + min(1.0, max(0.0, part)) * (self._end - self._begin)

    def ticks(self, about: int = 5) -> list[float]:
        """``about`` round values in the range."""
        if self.logarithmic:
            return self._log_ticks(about)
        rough = (self._high - self._low) / about
        power = 10.0 ** math.floor(math.log10(rough))
        step = next(m * power for m in (1, 2, 2.5, 5, 10) if m * power >= rough * 0.999)
        first = math.ceil(self._low / step - 1e-9)
        last = math.floor(self._high / step + 1e-9)
        return [round(i * step, 12) for i in range(first, last + 1)]

    def _log_ticks(self, about: int) -> list[float]:
        powers = range(math.floor(self._low), math.ceil(self._high) + 1)
        for parts in ((1, 2, 5), (1, 3), (1,)):
            found = [m * 10.0**k for k in powers for m in parts if self._low <= math.log10(m) + k <= self._high]
            if len(found) <= about + 2:
                return found
        return found[:: max(1, len(found) // about)]


def short(value: float) -> str:
    """A number with three digits, and `k` for thousands."""
    unit = 1000 if abs(value) >= 10_000 else 1
    text = f"{value / unit:.3g}"
    return (f"{value / unit:.0f}" if "e+" in text else text) + ("k" if unit > 1 else "")


WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 370, 10, 190

Point = tuple[float, float]


class Chart:
    """Collects shapes over two axes. Colours come from the page's CSS classes `a`, `b`, `band`, `grid`."""

    def __init__(self, title: str, x: Axis, y: Axis, x_label: str, y_label: str) -> None:
        self._title = title
        self._x, self._y = x, y
        self._parts: list[str] = []
        self._grid(x_label, y_label)

    def line(self, points: Sequence[Point], kind: str) -> None:
        self._parts.append(f'<polyline class="line {kind}" points="{self._path(points)}"/>')

    def band(self, low: Sequence[Point], high: Sequence[Point], kind: str) -> None:
        """The area between two lines."""
        self._parts.append(f'<polygon class="band {kind}" points="{self._path([*low, *reversed(high)])}"/>')

    def dots(self, points: Sequence[Point], kind: str) -> None:
        """A mark per point: round for the control, square for the treatment, not only by colour."""
        for x, y in points:
            left, top = self._x.at(x), self._y.at(y)
            if kind == "b":
                self._parts.append(
                    f'<rect class="dot b" x="{left - 2.2:.1f}" y="{top - 2.2:.1f}" width="4.4" height="4.4"/>'
                )
            else:
                self._parts.append(f'<circle class="dot {kind}" cx="{left:.1f}" cy="{top:.1f}" r="2.4"/>')

    def bar(self, x: float, shift: float, width: float, y: float, kind: str) -> None:
        """A bar from 0 to ``y``, ``shift`` pixels from ``x``."""
        top, foot = self._y.at(y), self._y.at(0)
        self._parts.append(
            f'<rect class="bar {kind}" x="{self._x.at(x) + shift:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(0.0, foot - top):.1f}"/>'
        )

    def svg(self) -> str:
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(self._title, quote=True)}">'
            + "".join(self._parts)
            + "</svg>"
        )

    def _grid(self, x_label: str, y_label: str) -> None:
        for value in self._y.ticks():
            top = self._y.at(value)
            self._parts.append(f'<line class="grid" x1="{LEFT}" x2="{RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')
            self._parts.append(f'<text class="end" x="{LEFT - 5}" y="{top + 3.5:.1f}">{short(value)}</text>')
        for value in self._x.ticks():
            left = self._x.at(value)
            self._parts.append(f'<line class="grid" x1="{left:.1f}" x2="{left:.1f}" y1="{BOTTOM}" y2="{BOTTOM + 4}"/>')
            self._parts.append(f'<text class="mid" x="{left:.1f}" y="{BOTTOM + 16}">{short(value)}</text>')
        middle = (LEFT + RIGHT) / 2
        self._parts.append(f'<text class="mid" x="{middle}" y="{HEIGHT - 8}">{escape(x_label)}</text>')
        centre = (TOP + BOTTOM) / 2
        self._parts.append(f'<text class="mid" transform="translate(10 {centre}) rotate(-90)">{escape(y_label)}</text>')

    def _path(self, points: Sequence[Point]) -> str:
        return " ".join(f"{self._x.at(x):.1f},{self._y.at(y):.1f}" for x, y in points)


def effect_chart(result: Result) -> str:
    """The interval that decides the verdict, against no change and negligible changes."""
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
        chart.line(points, kind)
    return chart.svg()


def timeline_chart(result: Result) -> str:
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
    """Accepted draft tokens per verify step, as shares of an arm's steps."""
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
