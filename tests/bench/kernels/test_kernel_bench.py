"""The GPU benches, on the CPU at toy sizes: that they run, and count bytes right."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from unittest import mock

import pytest
import torch

from bench.kernels import kernel_bench, linear_bench, step_figures
from bench.kernels.attention_bench import attention_figures, binary_tree
from bench.kernels.attention_case import CASES, AttentionCase
from bench.kernels.kernel_bench import KernelBench
from bench.kernels.kernel_timer import KernelTimer
from bench.kernels.step_figures import StepFigures
from draft.oracle import OracleDrafter
from specdec.models.random_shapes import RANDOM_SHAPES
from tests.engine.test_device_engine import NAME, SMALL, device_parts
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.models.device.small import place

DEVICE = place()


@pytest.fixture(autouse=True)
def quick() -> Iterator[None]:
    with quick_interpreter(), mock.patch.dict(RANDOM_SHAPES, {NAME: SMALL}):
        yield


def test_bytes_that_must_move() -> None:
    case = AttentionCase(2, 100, 3, heads=8, kv_heads=2, head_dim=64)
    keys_and_values = 2 * (100 + 3) * 2 * 2 * 64
    queries_and_results = 2 * 3 * 8 * 64 * 2
    assert case.least_bytes == 2 * (keys_and_values + queries_and_results)
    windowed = dataclasses.replace(case, window=10)
    assert case.least_bytes - windowed.least_bytes == 2 * 2 * 90 * 2 * 2 * 64
    assert len({case.name for case in CASES}) == len(CASES)
    assert binary_tree(6) == [-1, 0, 0, 1, 1, 2]


def test_a_part_without_time_is_left_out() -> None:
    with mock.patch.object(kernel_bench, "device_facts", return_value={}):
        bench = KernelBench(DEVICE, f"random:{NAME}", 0.0, print)
    report = bench.run()
    assert len(report["left_out"]) == len(CASES) + 2 + len(linear_bench.LLAMA_8B) * len(linear_bench.KINDS)
    assert report["attention"] == report["linear"] == []


def test_attention_is_measured() -> None:
    case = AttentionCase(1, 70, 3, heads=2, kv_heads=1, head_dim=64)
    figures = attention_figures(case, KernelTimer(DEVICE, 2), DEVICE, peak=1e9)
    assert figures["us"] > 0
    assert figures["bandwidth_share"] == pytest.approx(figures["least_bytes"] / (figures["us"] * 1e-6) / 1e9)


def test_a_step_is_measured() -> None:
    parts = device_parts()
    small = parts.config.speculation.model_copy(update={"fixed_nodes": 2, "fixed_depth": 2})
    settings = parts.config.model_copy(update={"speculation": small})
    parts = dataclasses.replace(parts, config=settings, drafters=[OracleDrafter(1.0)])
    with mock.patch.multiple(step_figures, ROWS=(1, 2), WARM_RUNS=1, TAIL_BATCH=2, TAIL_NODES=3):
        figures = StepFigures(parts, KernelTimer(DEVICE, 2), 1e9, context=70)
        one, two = figures.forwards()
        assert (one["rows"], one["over_one_row"]) == (1, 1.0)
        assert two["over_one_row"] == pytest.approx(two["us"] / one["us"])
        tail = figures.tail()
        assert (tail["entries"], tail["nodes"]) == (2, 3)
        assert min(tail["greedy_us"], tail["sampled_us"]) > 0
        found = figures.engine(tokens=5)
    assert found["off"]["tokens_per_step"] == 1
    assert found["on"]["tokens_per_step"] > 1
    assert 0 <= found["off"]["outside_verify_share"] < 1
    for pool in (parts.decoder.pool.k, parts.decoder.pool.v):  # type: ignore[attr-defined]
        assert torch.isfinite(pool).all()
