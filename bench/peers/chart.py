"""The chart of `specdec bench peers --chart`: time per token by workload and engine, as one SVG file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

from bench.peers.peer import OURS
from server.experiment.report.charts import Axis, short
from specdec.errors import ConfigError

WIDTH, LEFT, RIGHT, TOP = 720, 150, 676, 84
BAR, GAP, LEGEND_LINE, NOTE_LINE = 16, 18, 20, 15
NAMES = {"humaneval": "HumanEval", "fim": "fill-in-the-middle", "edit": "edits", "chat": "chat"}
OUR_COLOURS = ("#1d5fbf", "#8db4ea")  # the arm that drafts, the one that does not
OTHER_COLOURS = ("#d9822b", "#8a6d3b", "#7a7f87", "#b35c6e", "#5d8a66", "#9a7fb8")
# The background is drawn too, so the chart reads the same on a light page and on a dark one.
_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#24292f}"
    ".title{font-size:16px;font-weight:600}.end{text-anchor:end}.mid{text-anchor:middle}"
    ".note{font-size:11.5px;fill:#57606a}.grid{stroke:#d0d7de}"
)


def time_per_token_chart(report: Mapping[str, Any]) -> str:
    """An SVG with bars of the median time per token in ms, by workload and engine.

    report: as `PeersRun.as_dict`; its ``notes``, if any, are printed below the bars.

    Raises:
        ConfigError: it has no time per token.
    """
    engines = report["engines"]
    groups = {
        workload: {arm: float(s["median_ms"]) for arm, s in arms.items() if s.get("median_ms") is not None}
        for workload, arms in report["workloads"].items()
    }
    groups = {workload: _fastest_settings(bars, engines) for workload, bars in groups.items()}
    groups = {workload: bars for workload, bars in groups.items() if bars}
    if not groups:
        raise ConfigError("chart: no engine has a time per token; raise --max-tokens")
    names = [arm for arm in engines if any(arm in bars for bars in groups.values())]
    colours = _colours(names)
    top = TOP + LEGEND_LINE * len(names)
    bottom = top + sum(BAR * len(bars) + GAP for bars in groups.values())
    notes = report.get("notes", [])
    height = bottom + 44 + NOTE_LINE * len(notes)
    axis = Axis([0.0, max(ms for bars in groups.values() for ms in bars.values())], LEFT, RIGHT)
    parts = [
        f'<rect width="{WIDTH}" height="{height}" rx="8" fill="#f6f8fa" stroke="#d0d7de"/>',
        '<text class="title" x="20" y="30">Time per token, median</text>',
        '<text class="note" x="20" y="50">ms, shorter is faster</text>',
        *_legend(names, colours, engines),
        *_grid(axis, top - 6, bottom),
        *_bars(groups, names, colours, axis, top),
    ]
    for number, note in enumerate(notes):
        parts.append(f'<text class="note" x="20" y="{bottom + 40 + NOTE_LINE * number}">{escape(note)}</text>')
    label = "Time per token in ms by workload and engine: " + "; ".join(
        f"{NAMES.get(workload, workload)}: " + ", ".join(f"{arm} {short(bars[arm])}" for arm in names if arm in bars)
        for workload, bars in groups.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img" '
        f'aria-label="{escape(label, quote=True)}">\n<style>{_STYLE}</style>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _fastest_settings(bars: Mapping[str, float], engines: Mapping[str, Any]) -> dict[str, float]:
    """``bars`` without the settings of an engine that are slower than another drafting setting of it."""
    plain = {arm: engines[arm].get("plain", arm) for arm in bars}
    fastest: dict[str, str] = {}  # by the engine's plain arm
    for arm in sorted(bars, key=bars.__getitem__):
        if plain[arm] != arm:
            fastest.setdefault(plain[arm], arm)
    return {arm: ms for arm, ms in bars.items() if plain[arm] == arm or fastest[plain[arm]] == arm}


def _colours(names: Sequence[str]) -> dict[str, str]:
    ours = [name for name in names if name.startswith(OURS)]
    others = [name for name in names if name not in ours]
    found = {name: OUR_COLOURS[name.endswith(" off")] for name in ours}
    return found | {name: OTHER_COLOURS[i % len(OTHER_COLOURS)] for i, name in enumerate(others)}


def _legend(names: Sequence[str], colours: Mapping[str, str], engines: Mapping[str, Any]) -> Iterator[str]:
    for line, name in enumerate(names):
        y = TOP - 10 + LEGEND_LINE * line
        yield f'<rect x="20" y="{y - 11}" width="14" height="14" rx="2" fill="{colours[name]}"/>'
        label = escape(f"{name} ({engines[name]['weights']})")
        yield f'<text x="40" y="{y}">{label}</text>'


def _grid(axis: Axis, top: float, bottom: float) -> Iterator[str]:
    for value in axis.ticks():
        x = axis.at(value)
        yield f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom - 8}"/>'
        yield f'<text class="mid" x="{x:.1f}" y="{bottom + 8}">{short(value)}</text>'


def _bars(
    groups: Mapping[str, Mapping[str, float]], names: Sequence[str], colours: Mapping[str, str], axis: Axis, top: float
) -> Iterator[str]:
    zero, y = axis.at(0.0), top
    for workload, bars in groups.items():
        middle = y + BAR * len(bars) / 2
        name = NAMES.get(workload, workload)
        yield f'<text class="end" x="{LEFT - 2}" y="{middle + 4.5:.1f}">{escape(name)}</text>'
        for arm in (name for name in names if name in bars):
            end = axis.at(bars[arm])
            yield (
                f'<rect x="{zero:.1f}" y="{y + 1}" width="{end - zero:.1f}" height="{BAR - 2}" rx="2" '
                f'fill="{colours[arm]}"><title>{escape(f"{name}, {arm}: {bars[arm]:g} ms")}</title></rect>'
                f'<text x="{end + 5:.1f}" y="{y + BAR - 3.5:.1f}">{round(bars[arm], 1):g}</text>'
            )
            y += BAR
        y += GAP
