"""A small chart as inline SVG."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from server.experiment.report.axis import Axis, short

WIDTH, HEIGHT = 380, 230
LEFT, RIGHT, TOP, BOTTOM = 52, 370, 10, 190

Point = tuple[float, float]


class Chart:
    """Collects shapes over two axes. Colours are the page's: classes `a`, `b`, `band`, `grid`, `zero`."""

    def __init__(self, title: str, x: Axis, y: Axis, x_label: str, y_label: str) -> None:
        self._title = title
        self._x, self._y = x, y
        self._parts: list[str] = []
        self._grid(x_label, y_label)

    def line(self, points: Sequence[Point], kind: str) -> None:
        """Points joined in order."""
        self._parts.append(f'<polyline class="line {kind}" points="{self._path(points)}"/>')

    def steps(self, points: Sequence[Point], kind: str) -> None:
        """A staircase that rises at each point's x."""
        self.line(_staircase(points), kind)

    def band(self, low: Sequence[Point], high: Sequence[Point], kind: str) -> None:
        """The area between two lines."""
        self._parts.append(f'<polygon class="band {kind}" points="{self._path([*low, *reversed(high)])}"/>')

    def dots(self, points: Sequence[Point], kind: str) -> None:
        """One mark per point: round for the control, square for the treatment, so that colour is not needed."""
        for x, y in points:
            left, top = self._x.at(x), self._y.at(y)
            if kind == "b":
                self._parts.append(
                    f'<rect class="dot b" x="{left - 2.2:.1f}" y="{top - 2.2:.1f}" width="4.4" height="4.4"/>'
                )
            else:
                self._parts.append(f'<circle class="dot {kind}" cx="{left:.1f}" cy="{top:.1f}" r="2.4"/>')

    def bar(self, x: float, shift: float, width: float, y: float, kind: str) -> None:
        """A bar from 0 to ``y``, ``shift`` pixels beside ``x``."""
        top, foot = self._y.at(y), self._y.at(0)
        self._parts.append(
            f'<rect class="bar {kind}" x="{self._x.at(x) + shift:.1f}" y="{top:.1f}" width="{width:.1f}" '
            f'height="{max(0.0, foot - top):.1f}"/>'
        )

    def level(self, y: float) -> None:
        """A line across at ``y``."""
        top = self._y.at(y)
        self._parts.append(f'<line class="zero" x1="{LEFT}" x2="{RIGHT}" y1="{top:.1f}" y2="{top:.1f}"/>')

    def svg(self) -> str:
        """The drawing, to be put into a page as it is."""
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


def _staircase(points: Sequence[Point]) -> list[Point]:
    corners: list[Point] = []
    for x, y in points:
        if corners:
            corners.append((x, corners[-1][1]))
        corners.append((x, y))
    return corners
