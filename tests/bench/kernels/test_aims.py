"""The table of aims: every aim has its worst figure, or the reason why there is none."""

from __future__ import annotations

from typing import Any

import pytest

from bench.kernels.attention import CASES, COMPARED
from bench.kernels.kernel_bench import AIMS, aims

FORWARDS = [
    {"rows": 1, "us": 4000.0, "over_one_row": 1.0, "bandwidth_share": 0.85, "over_fastest": 1.0},
    {"rows": 32, "us": 4200.0, "over_one_row": 1.05, "bandwidth_share": 0.82, "over_fastest": 1.2},
    {"rows": 64, "us": 4500.0, "over_one_row": 1.125, "bandwidth_share": 0.7, "over_fastest": 1.05},
]
STEP: dict[str, Any] = {
    "target": "random:llama-3.1-8b", "device_dtype": "auto", "kv_dtype": "auto", "forwards": FORWARDS,
    "prefill": {"rows": 2048, "share_of_products": 0.7},
    "tail": {"entries": 8, "nodes": 16, "greedy_us": 40.0, "greedy_moves": 24, "sampled_us": 59.0, "sampled_moves": 24},
    "engine": {
        "drafters": ["oracle:0.8"], "speed_up": 3.5, "off": {"host_gap_between_steps": 0.04},
        "on": {"host_gap_between_steps": 0.02},
    },
}  # fmt: skip


def report(**changes: Any) -> dict[str, Any]:
    attention = [
        {"name": case.name, "us": 10.0 + case.nodes / 16, "bandwidth_share": case.context / 40_000} for case in CASES
    ]
    rivals = [{"name": case.name, "flashinfer_skipped": "ImportError: no"} for case in COMPARED]
    whole = {"attention": attention, "rivals": rivals, "steps": [STEP], "errors": []}
    return {**whole, **changes}


def line(found: list[dict[str, Any]], part: str) -> dict[str, Any]:
    (only,) = [each for each in found if part in each["measure"]]
    return only


def test_every_aim_has_its_worst_figure() -> None:
    found = aims(report())
    figures = {each["measure"].split(",")[0].split(":")[0]: (each["figure"], each["met"]) for each in found}
    assert figures == {
        "tree_attention": (0.1024, False),
        "batch 1": (0.8192, True),
        "16-node tree against the same kernel with 1 row": (pytest.approx(11 / 10.0625, abs=1e-4), True),
        "FlashInfer's custom-mask prefill on the same trees": (None, None),
        "verify of 32 rows": (1.05, True),
        "one verify step": (0.82, True),
        "prefill": (0.7, True),
        "host gap between steps": (0.04, False),
        "accept + sampling + KV move": (59.0, True),
        "bitwise mode against the fastest mode": (1.2, False),
        "speed-up with oracle": (3.5, True),
    }
    assert "ImportError" in line(found, "FlashInfer")["note"]
    beside = line(
        aims(report(rivals=[{"name": case.name, "flashinfer_over_ours": 2.0} for case in COMPARED])), "FlashInfer"
    )
    assert (beside["figure"], beside["met"]) == (2.0, True)
    assert "speculation off" in line(found, "host gap")["note"]


def test_a_missing_figure_has_its_reason() -> None:
    errors = [{"case": "steps auto auto tail", "message": "RuntimeError: no", "at": []}]
    found = aims(report(errors=errors, rivals=[], steps=[{**STEP, "tail": None}]))
    assert line(found, "KV move")["note"] == "not measured: steps auto auto tail: RuntimeError: no"
    assert line(found, "host gap")["met"] is False
    assert "did not reach it" in line(found, "FlashInfer")["note"]
    no_step = aims(report(steps=[], errors=[{"case": "steps auto auto", "message": "OutOfMemoryError", "at": []}]))
    assert "OutOfMemoryError" in line(no_step, "speed-up")["note"]
    nothing = aims({"errors": []})
    assert all("did not reach it" in each["note"] for each in nothing)
    assert len(nothing) == len(AIMS)


def test_other_types_and_still_trees_are_not_what_the_aims_mean() -> None:
    still = {**STEP["tail"], "greedy_moves": 0, "sampled_moves": 0}
    found = aims(report(steps=[{**STEP, "device_dtype": "fp8"}, {**STEP, "tail": still}]))
    assert line(found, "KV move")["figure"] is None
    assert line(found, "speed-up")["figure"] == 3.5
