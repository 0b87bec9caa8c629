"""The table of aims, each with what a report says of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from bench.kernels.aim import Aim
from bench.kernels.attention_case import CASES, AttentionCase

Report = Mapping[str, Any]
Found = Iterator[tuple[float, str]]
STEP = "steps auto auto"  # as errors call the step in 16 bits
MANY = 1 << 20  # token-heads: batch x KV heads x context
MOST_ROWS, VERIFIED = 64, 32


def aims(report: Report) -> list[dict[str, Any]]:
    """One line for each aim: ``measure``, ``aim``, ``figure`` (the worst of those it is about, None where there is
    none), ``met`` and a ``note``: which case the figure is of, or why there is none."""
    return [aim.judged(report) for aim in AIMS]


def _many_heads(report: Report) -> Found:
    for case, figures in _cases(report):
        keys = min(case.context, case.window) if case.window else case.context
        if case.batch * case.kv_heads * keys >= MANY:
            yield figures["bandwidth_share"], case.name


def _long_context(report: Report) -> Found:
    for case, figures in _cases(report):
        if case == AttentionCase(1, 32768, 16):
            yield figures["bandwidth_share"], case.name


def _nodes_over_row(report: Report) -> Found:
    times = {case: figures["us"] for case, figures in _cases(report)}
    for case, took in times.items():
        alone = replace(case, nodes=1)
        if case.nodes == 16 and alone in times:
            yield took / times[alone], case.name


def _cases(report: Report) -> Iterator[tuple[AttentionCase, Mapping[str, Any]]]:
    by_name = {case.name: case for case in CASES}
    for figures in report.get("attention", []):
        if figures["name"] in by_name:
            yield by_name[figures["name"]], figures


def _over_flashinfer(report: Report) -> Found:
    yield from _over(report, "flashinfer")


def _over_flex(report: Report) -> Found:
    yield from _over(report, "flex")


def _over(report: Report, rival: str) -> Found:
    for figures in report.get("rivals", []):
        if f"{rival}_over_ours" in figures:
            yield figures[f"{rival}_over_ours"], figures["name"]


def _step(report: Report, part: str) -> Any:
    """The ``part`` of the step in 16 bits, in which the aims are stated; empty where it was not measured."""
    for step in report.get("steps", []):
        if (step["device_dtype"], step["kv_dtype"]) == ("auto", "auto"):
            return step[part] or {}
    return {}


def _rows_over_one(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] == VERIFIED:
            yield line["over_one_row"], f"{VERIFIED} rows"


def _step_bandwidth(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] <= VERIFIED:
            yield line["bandwidth_share"], f"{line['rows']} rows"


def _over_fastest(report: Report) -> Found:
    for line in _step(report, "forwards"):
        if line["rows"] <= MOST_ROWS and "over_fastest" in line:
            yield (
                line["over_fastest"],
                f"{line['rows']} rows; fastest: the library's linear layers where they are faster",
            )


def _host_gap(report: Report) -> Found:
    for mode in ("off", "on"):
        if mode in _step(report, "engine"):
            yield _step(report, "engine")[mode]["host_gap_between_steps"], f"speculation {mode}"


def _tail(report: Report) -> Found:
    tail = _step(report, "tail")
    for name in ("greedy", "sampled"):
        if tail.get(f"{name}_moves"):  # without a move it is another measure
            yield tail[f"{name}_us"], f"{name}, {tail['entries']} trees of {tail['nodes']} nodes"


def _speed_up(report: Report) -> Found:
    engine = _step(report, "engine")
    if "speed_up" in engine:
        yield engine["speed_up"], ", ".join(engine["drafters"])


AIMS = (
    Aim("tree_attention, batch x kv_heads x context >= 1M token-heads: share of HBM bandwidth by the bytes-moved bound",
        "attention", 0.80, _many_heads, least=True),
    Aim("batch 1, context 32k, 16 nodes, 8 kv heads, head_dim 128: share of HBM bandwidth", "attention", 0.60,
        _long_context, least=True),
    Aim("16-node tree against the same kernel with 1 row", "attention", 1.10, _nodes_over_row),
    Aim("FlashInfer's custom-mask prefill on the same trees, over ours", "rivals", 1.5, _over_flashinfer, least=True,
        skipped="flashinfer_skipped"),
    Aim("torch FlexAttention on the same trees, over ours", "rivals", 1.5, _over_flex, least=True,
        skipped="flex_skipped"),
    Aim("verify of 32 rows, 8B shape, batch 1, 4k context, against 1 row", STEP + " forwards", 1.08, _rows_over_one),
    Aim("one verify step, 8B shape, batch 1: weight and KV bytes over HBM bandwidth", STEP + " forwards", 0.80,
        _step_bandwidth, least=True),
    Aim("host gap between steps", STEP + " engine", 0.03, _host_gap),
    Aim("accept + sampling + KV move, microseconds per step at batch 8", STEP + " tail", 60.0, _tail),
    Aim("bitwise mode against the fastest mode, step time at <= 64 rows", STEP + " forwards", 1.10, _over_fastest),
    Aim("speed-up with oracle:0.8 at batch 1, 8B shape", STEP + " engine", 3.0, _speed_up, least=True),
)  # fmt: skip
