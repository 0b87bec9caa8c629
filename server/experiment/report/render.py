"""The HTML page of a result."""

from __future__ import annotations

from importlib import resources
from itertools import groupby
from operator import attrgetter

import jinja2
from markupsafe import Markup

from server.experiment.analysis.result import Bounds, Result, TargetResult
from server.experiment.report import charts
from specdec.load.figures import percent

_ABOUT = {
    "paired_replay": "every request was served in both arms",
    "switchback": "all requests changed arm between blocks of time",
    "hash": "every key had one arm",
    "aa": "both arms are the same, so all differences are noise",
}


_NOTHING = "\N{EN DASH}"


def render(result: Result) -> str:
    """One self-contained HTML page; texts of the result are escaped."""
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters.update(num=_number, span=_span, share=_share, percent=percent, change=_change)
    template = resources.files(__package__).joinpath("report.html.j2").read_text(encoding="utf-8")
    drawings = {
        "effect": charts.effect_chart(result),
        "distribution": charts.distribution_chart(result),
        "timeline": charts.timeline_chart(result),
        "acceptance": charts.acceptance_chart(result),
    }
    return environment.from_string(template).render(
        r=result,
        charts={name: Markup(svg) for name, svg in drawings.items()},
        groups=[(title, list(rows)) for title, rows in groupby(result.table, attrgetter("title"))],
        mode=_ABOUT[result.mode],
        settings=_settings(result),
        level=percent(1 - result.alpha),
    )


def _settings(result: Result) -> list[tuple[str, str, str, bool]]:
    """All settings of both arms (name, control, treatment, whether they differ), different ones first."""
    a, b = (arm.settings for arm in result.arms)
    rows = [(key, a.get(key, "default"), b.get(key, "default")) for key in sorted(a.keys() | b.keys())]
    return sorted(((k, x, y, x != y) for k, x, y in rows), key=lambda row: not row[3])


def _number(value: float | None, unit: str = "") -> str:
    if value is None:
        return _NOTHING
    digits = 0 if abs(value) >= 1000 else 1 if abs(value) >= 100 else 2 if abs(value) >= 10 else 3
    return f"{value:,.{digits}f}".replace(",", " ") + (f" {unit}" if unit else "")


def _span(bounds: Bounds) -> str:
    low, high = bounds
    if low is None or high is None:
        return "too few records"
    return f"{_number(low)} … {_number(high)}"


def _share(value: float | None) -> str:
    return _NOTHING if value is None else f"{value:+.1%}"


def _change(target: TargetResult) -> str:
    """`good` or `bad` if the treatment moved the metric; empty if the interval contains no change."""
    low, high = target.ratio_bounds
    if low is None or high is None or low <= 1 <= high:
        return ""
    return "good" if (high < 1) == target.lower_is_better else "bad"
