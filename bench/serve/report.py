"""The report of a run of load: tables on the terminal, or one HTML file."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq
from html import escape
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.serve.load import LoadRun, ServeReport
from server.experiment.report.charts import BOTTOM, LEFT, RIGHT, TOP, Axis, Chart
from specdec.load.figures import QUANTILES, spread

NAMES = {
    "ttft_ms": "time to first text, ms",
    "tpot_ms": "time per output token, ms",
    "inter_chunk_ms": "between messages, ms",
    "e2e_ms": "whole answer, ms",
    "tokens_per_chunk": "tokens per message",
}


def progress_line(run: LoadRun, now_s: float) -> Text:
    """Where a run is."""
    ended = [record for record in run.records if record.end_s]
    answered = [record for record in ended if record.ok]
    tokens = sum(record.output_tokens for record in answered)
    passed = max(now_s - run.started_s, 1e-3)
    ttft = spread([record.ttft_ms for record in answered])
    of = "" if run.planned is None else f"/{run.planned}"
    words = [
        f"{passed:6.1f} s", f"sent {len(run.records)}{of}", f"running {len(run.records) - len(ended)}",
        f"answered {len(answered)}", f"not {len(ended) - len(answered)}", f"{tokens / passed:.1f} tokens/s",
        f"TTFT p50 {ttft['p50']:.0f} p99 {ttft['p99']:.0f} ms" if answered else "TTFT -",
    ]  # fmt: skip
    return Text("  ".join(words), style="dim")


def report_tables(report: ServeReport) -> Iterator[Table | Text]:
    """Latencies, totals, and first of all whether they count."""
    figures = report.as_dict(requests=False)
    yield validity(figures)
    latency = Table("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max", title=str(figures.get("load", "")))
    for name, cells in latency_rows(figures):
        latency.add_row(name, *cells)
    yield latency
    totals = Table("figure", "value")
    for name, value in total_rows(figures):
        totals.add_row(name, value)
    yield totals


def validity(figures: dict[str, Any]) -> Text:
    """One line per reason for which the run does not count."""
    if figures["valid"]:
        return Text("valid: the generator kept up", style="green")
    return Text("\n".join(f"INVALID: {fault}" for fault in figures["faults"]), style="bold red")


def latency_rows(figures: dict[str, Any]) -> list[tuple[str, list[str]]]:
    """Name and cells (n, mean, quantiles, max) of every spread."""
    columns = ("mean", *(f"p{q}" for q in QUANTILES), "max")
    return [
        (NAMES[name], [str(found["n"]), *(f"{found[c]:.2f}" if found["n"] else "-" for c in columns)])
        for name, found in figures["latency"].items()
    ]


def total_rows(figures: dict[str, Any]) -> list[tuple[str, str]]:
    """Name and value of every other figure."""
    requests, goodput, generator = figures["requests"], figures["goodput"], figures["generator"]
    limits = ", ".join(f"{limit} ms" for limit in goodput["objectives"]) or "no objective"
    rows = [
        ("requests", ", ".join(f"{count} {name}" for name, count in requests.items() if count)),
        ("duration, s", f"{figures['duration_s']:.1f}"),
        *((name.replace("_per_s", "/s").replace("_", " "), f"{v:.2f}") for name, v in figures["throughput"].items()),
        ("goodput, requests/s", f"{goodput['requests_per_s']:.2f} ({limits})"),
        ("good of all sent", f"{goodput['share_of_sent']:.1%}"),
        ("sent late, ms at p99", _p99(generator["slip_ms"])),
        ("generator late, ms at p99", _p99(generator["lag_ms"])),
    ]
    if "tokens_per_step" in figures:
        rows.append(("tokens per step", f"{figures['tokens_per_step']['mean']:.2f}"))
    if "cost" in figures:
        rows.append(("output tokens per dollar", f"{figures['cost']['output_tokens_per_dollar']:,}"))
    if figures["refusals"]["n"]:
        refusals = figures["refusals"]
        rows.append(("refusals with a retry hint", f"{refusals['with_retry_hint']} of {refusals['n']}"))
    rows += [(f"error ({count} x)", error[:120]) for error, count in figures["errors"].items()]
    return rows


def _p99(found: dict[str, Any]) -> str:
    return f"{found['p99']:.2f}" if found["n"] else "-"


_HEAD = (
    '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>specdec bench serve</title>'
    '<meta name="viewport" content="width=device-width,initial-scale=1">'
)
_STYLE = """
:root{color-scheme:light dark}
body{font:15px/1.5 system-ui,sans-serif;max-width:46rem;margin:2rem auto;padding:0 1rem}
table{border-collapse:collapse;width:100%;margin:1rem 0;font-variant-numeric:tabular-nums}
td,th{padding:.25rem .5rem;border-bottom:1px solid #8884;text-align:right}
td:first-child,th:first-child{text-align:left}
.scroll{overflow-x:auto}.good{color:#157a2f}.bad{color:#c22}
svg{width:100%;height:auto;overflow:visible}svg text{font-size:9px;fill:currentColor}
svg .end{text-anchor:end}svg .mid{text-anchor:middle}svg .grid{stroke:currentColor;opacity:.3}
svg .line{fill:none;stroke:#2667c9;stroke-width:1.5}svg .dot{fill:#2667c9;opacity:.5}
figure{margin:1.5rem 0}
"""


def report_html(report: ServeReport) -> str:
    """One page: whether the run counts, its figures, how answers' times are distributed and how they went."""
    figures = report.as_dict(requests=False)
    answered, start = report.answered, report.run.started_s
    verdict = (
        '<p class="good">Valid: the generator kept up.</p>'
        if figures["valid"]
        else "".join(f'<p class="bad"><strong>INVALID:</strong> {escape(fault)}</p>' for fault in figures["faults"])
    )
    heads = ("", "n", "mean", *(f"p{q}" for q in QUANTILES), "max")
    about = [(name, str(value)) for name, value in report.about.items() if value is not None]
    tpots = [tpot for record in answered if (tpot := record.tpot_ms) is not None]
    parts = [
        f"<h1>{escape(str(figures.get('load', 'Load')))}</h1>",
        verdict,
        _table(heads, [(name, *cells) for name, cells in latency_rows(figures)]),
        _table(("figure", "value"), total_rows(figures)),
        _distribution("Time to first text: share of answers within so many ms", [r.ttft_ms for r in answered]),
        _distribution("Time per output token: share of answers within so many ms", tpots),
        _course(
            "Time to first text, by when the request was due",
            [(r.due_s - start, r.ttft_ms) for r in answered],
        ),
        _table(("about", ""), about),
    ]
    body = "\n".join(parts)
    return f"{_HEAD}<style>{_STYLE}</style></head><body>{body}</body></html>\n"


def _table(heads: Seq[str], rows: Seq[Seq[str]]) -> str:
    top = "".join(f"<th>{escape(head)}</th>" for head in heads)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{top}</tr></thead><tbody>{lines}</tbody></table></div>'


def _distribution(title: str, values: Seq[float]) -> str:
    if not values:
        return ""
    shares = [(value, number / len(values)) for number, value in enumerate(sorted(values), 1)]
    chart = Chart(title, Axis([0.0, *values], LEFT, RIGHT), Axis([0.0, 1.0], BOTTOM, TOP), "ms", "share of answers")
    chart.steps([(0.0, 0.0), *shares], "a")
    return _figure(title, chart)


def _course(title: str, points: Seq[tuple[float, float]]) -> str:
    if not points:
        return ""
    x, y = Axis([0.0, *(x for x, _ in points)], LEFT, RIGHT), Axis([0.0, *(y for _, y in points)], BOTTOM, TOP)
    chart = Chart(title, x, y, "due, s", "ms")
    chart.dots(points, "a")
    return _figure(title, chart)


def _figure(title: str, chart: Chart) -> str:
    return f"<figure>{chart.svg()}<figcaption>{escape(title)}</figcaption></figure>"
