"""The GPU benches, on the CPU at toy sizes: that they run, and count bytes right."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from bench.kernels import kernel_bench, linear_bench, step_figures
from bench.kernels.attention_bench import attention_figures
from bench.kernels.attention_case import CASES, COMPARED, AttentionCase
from bench.kernels.attention_work import AttentionWork, binary_tree
from bench.kernels.flex_rival import flex_rival
from bench.kernels.kernel_bench import STEPS, UNTIL, KernelBench
from bench.kernels.kernel_timer import KernelTimer
from bench.kernels.rivals import RIVALS, rival_figures
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
    layers = len(linear_bench.LLAMA_8B) * len(linear_bench.KINDS)
    assert len(report["left_out"]) == len(CASES) + len(STEPS) + len(COMPARED) + layers
    assert report["attention"] == report["linear"] == []
    assert list(UNTIL) == [name for name in report if name not in ("facts", "left_out", "spent")]
    assert list(UNTIL.values()) == sorted(UNTIL.values())


def test_a_part_leaves_time_to_those_after_it() -> None:
    with mock.patch.object(kernel_bench, "device_facts", return_value={}):
        bench = KernelBench(DEVICE, f"random:{NAME}", 1e6, print)
    bench._part("attention", (1, 2), lambda item: [{"item": item}])
    bench._began -= 0.3e6  # its share is over, the next one's is not
    bench._part("attention", (3,), lambda item: [{"item": item}])
    bench._part("steps", (4,), lambda item: [{"item": item}])
    assert bench.report["attention"] == []
    assert bench.report["left_out"] == ["attention 3"]
    assert bench.report["steps"] == [{"item": 4}]
    assert set(bench.report["spent"]) == {"attention", "steps"}


def test_attention_is_measured() -> None:
    case = AttentionCase(1, 70, 3, heads=2, kv_heads=1, head_dim=64)
    figures = attention_figures(case, KernelTimer(DEVICE, 2), DEVICE, peak=1e9)
    assert figures["us"] > 0
    assert figures["bandwidth_share"] == pytest.approx(figures["least_bytes"] / (figures["us"] * 1e-6) / 1e9)


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
def test_rivals_compute_the_same_or_are_left_out() -> None:
    """FlexAttention runs on a CPU too, as plain torch; what it would be compiled to is for a GPU."""
    case = AttentionCase(2, 70, 5, heads=4, kv_heads=2, head_dim=64)

    def wrong(work: AttentionWork) -> Callable[[], torch.Tensor]:
        return lambda: flex_rival(work)() * 1.1

    def missing(work: AttentionWork) -> Callable[[], torch.Tensor]:
        raise ImportError("no such library")

    with mock.patch.dict(RIVALS, {"flex": flex_rival, "wrong": wrong, "flashinfer": missing}):
        found = rival_figures(case, KernelTimer(DEVICE, 2), DEVICE)
    assert found["flex_difference"] < 5e-3
    assert found["flex_over_ours"] == pytest.approx(found["flex_us"] / found["us"])
    assert "differ" in found["wrong_skipped"]
    assert found["flashinfer_skipped"] == "ImportError: no such library"


def test_a_step_is_measured() -> None:
    parts = device_parts()
    small = parts.config.speculation.model_copy(update={"fixed_nodes": 2, "fixed_depth": 2})
    settings = parts.config.model_copy(update={"speculation": small})
    parts = dataclasses.replace(parts, config=settings, drafters=[OracleDrafter(1.0)])
    with mock.patch.multiple(step_figures, ROWS=(1, 2), WARM_RUNS=1, TAIL_BATCH=2, TAIL_NODES=3):
        figures = StepFigures(parts, KernelTimer(DEVICE, 2), 1e9, context=20)
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
