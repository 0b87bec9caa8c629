"""`specdec bench step` on a tiny model: every figure is there and hangs together."""

from __future__ import annotations

import json
from typing import cast

from bench.forward import ROWS, StepBench, weight_bytes
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
    assert printed["rows8_over_rows1"] == round(figures.rows8_over_rows1[256], 3)
    assert printed["prefill_tokens_per_s"] > 0
