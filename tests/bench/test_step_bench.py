"""`specdec bench step` on a tiny model: every figure is there and hangs together."""

from __future__ import annotations

import json
from typing import cast

from bench.forward import ROWS, ForwardFigures, StepBench, weight_bytes
from specdec.models.decoder import Decoder
from tests.engine.tiny_engine import tiny_parts


def test_all_figures_of_a_model() -> None:
    parts = tiny_parts()
    figures = StepBench(parts, parts.config).run(repeats=3)
    assert figures.weight_bytes == weight_bytes(cast(Decoder, parts.decoder)) > 0
    assert list(figures.step_ms) == [256]  # the longer context does not fit the tiny model
    assert tuple(figures.step_ms[256]) == ROWS
    assert all(time > 0 for time in figures.step_ms[256].values())
    assert 0 < figures.overhead_ms < figures.engine_step_ms
    printed = json.loads(json.dumps(figures.as_dict()))
    assert set(printed["definitions"]) <= set(printed)
    assert printed["prefill_tokens_per_s"] > 0


def test_ratios_are_those_of_the_medians_beside_them() -> None:
    figures = ForwardFigures(1_543_000_000, 42.6031e9)
    figures.step_ms = {256: dict.fromkeys(ROWS, 60.0) | {1: 52.8004, 8: 64.6}, 2048: {1: 55.0, 8: 71.5}}
    printed = figures.as_dict()
    step_ms = printed["step_ms"]
    assert printed["row1_ms"] == step_ms["256"]["1"] == 52.8
    assert printed["rows8_over_rows1"] == printed["rows8_over_rows1_at_256"] == round(64.6 / 52.8, 3)
    assert printed["rows8_over_rows1_at_2048"] == 1.3
    read_ms = printed["weight_bytes"] / (printed["read_bandwidth_gb_s"] * 1e9) * 1e3
    assert printed["bandwidth_fraction"] == round(read_ms / printed["row1_ms"], 3) == 0.686
