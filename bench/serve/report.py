"""The report of a load run as tables for the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.table import Table
from rich.text import Text

from bench.serve.load import LoadRun, ServeReport
from specdec.load.figures import QUANTILES, spread

NAMES = {
    "ttft_ms": "time to first text, ms",
    "tpot_ms": "time per output token, ms",
    "inter_chunk_ms": "between messages, ms",
    "e2e_ms": "whole answer, ms",
    "tokens_per_chunk": "tokens per message",
}


def progress_line(run: LoadRun, now_s: float) -> str:
    """The progress of a run."""
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
    return "  ".join(words)


def report_tables(report: ServeReport) -> Iterator[Table | Text]:
    """Validity, latencies and totals."""
    figures = report.as_dict(requests=False)
    faults = "\n".join(f"INVALID: {fault}" for fault in figures["faults"])
    yield Text(faults, style="bold red") if faults else Text("valid: the generator kept up", style="green")
    columns = ("mean", *(f"p{q}" for q in QUANTILES), "max")
    latency = Table("", "n", *columns, title=str(figures.get("load", "")))
    for name, found in figures["latency"].items():
        cells = (f"{found[column]:.2f}" if found["n"] else "-" for column in columns)
        latency.add_row(NAMES[name], str(found["n"]), *cells)
    yield latency
    totals = Table("figure", "value")
    for name, value in _totals(figures):
        totals.add_row(name, value)
    yield totals


def _totals(figures: dict[str, Any]) -> list[tuple[str, str]]:
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
