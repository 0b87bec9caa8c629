"""The GPU benchmarks on the CPU at toy sizes: they run and count bytes correctly."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from unittest import mock

import pytest
import torch

from bench.kernels import attention, kernel_bench
from bench.kernels import step as step_figures
from bench.kernels.attention import (
    CASES,
    COMPARED,
    AttentionCase,
    AttentionWork,
    attention_figures,
    binary_tree,
    rival_figures,
)
from bench.kernels.kernel_bench import KernelBench
from bench.kernels.step import LibraryLinear, StepFigures, library_network
from bench.kernels.timer import KernelTimer
from draft.oracle import OracleDrafter
from specdec.models.device_decoder import DeviceDecoder
from specdec.models.random_model import RANDOM_SHAPES
from tests.engine.test_device_engine import NAME, SMALL, device_parts
from tests.kernels.gpu.quick_interpreter import quick_interpreter
from tests.models.device.small import place
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

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


def test_only_parts_asked_for_are_measured() -> None:
    with mock.patch.object(kernel_bench, "device_facts", return_value={}):
        bench = KernelBench(DEVICE, f"random:{NAME}", print)
    with mock.patch.object(kernel_bench, "rival_figures", side_effect=lambda case, *_: {"name": case.name}):
        report = bench.run(["rivals"])
    assert [line["name"] for line in report["rivals"]] == [case.name for case in COMPARED]
    assert not {"attention", "steps"} & set(report)


def test_an_error_ends_nothing_else() -> None:
    said: list[str] = []
    with mock.patch.object(kernel_bench, "device_facts", return_value={}):
        bench = KernelBench(DEVICE, f"random:{NAME}", said.append)

    def figures(item: int) -> list[dict[str, int]]:
        if item == 2:
            raise RuntimeError("the chip is on fire")
        return [{"item": item}]

    bench._part("rivals", (1, 2), figures)
    bench._part("rivals", (3,), figures)
    assert bench.report["rivals"] == [{"item": 1}, {"item": 3}]
    (error,) = bench.report["errors"]
    assert (error["case"], error["message"]) == ("rivals 2", "RuntimeError: the chip is on fire")
    assert "figures" in error["at"][-1]
    assert "on fire" in said[1]


def test_attention_is_measured() -> None:
    case = AttentionCase(1, 70, 3, heads=2, kv_heads=1, head_dim=64)
    figures = attention_figures(case, KernelTimer(DEVICE, 2), DEVICE, peak=1e9)
    assert figures["us"] > 0
    assert figures["bandwidth_share"] == pytest.approx(figures["least_bytes"] / (figures["us"] * 1e-6) / 1e9)


def test_rivals_compute_the_same_or_are_left_out() -> None:
    case = AttentionCase(2, 5, 3, heads=2, kv_heads=1, head_dim=64)

    def right(work: AttentionWork) -> Callable[[], torch.Tensor]:
        work.attend()
        out = work.out.clone()
        return lambda: out

    def wrong(work: AttentionWork) -> Callable[[], torch.Tensor]:
        return lambda: right(work)() * 1.1

    def missing(work: AttentionWork) -> Callable[[], torch.Tensor]:
        raise ImportError("no such library")

    found = []
    for rival in (right, wrong, missing):
        with mock.patch.object(attention, "flashinfer_rival", rival):
            found.append(rival_figures(case, KernelTimer(DEVICE, 2), DEVICE))
    assert found[0]["flashinfer_difference"] == 0
    assert found[0]["flashinfer_over_ours"] == pytest.approx(found[0]["flashinfer_us"] / found[0]["us"])
    assert "differ" in found[1]["flashinfer_skipped"]
    assert found[2]["flashinfer_skipped"] == "ImportError: no such library"


def test_a_step_is_measured() -> None:
    parts = device_parts()
    parts = dataclasses.replace(parts, drafters=[OracleDrafter(1.0)])
    with mock.patch.multiple(step_figures, ROWS=(1, 2), ENGINE_RUNS=1, ENGINE_NODES=2, TAIL_BATCH=2, TAIL_NODES=4):
        figures = StepFigures(parts, KernelTimer(DEVICE, 2), 1e9, context=20)
        one, two = figures.forwards()
        assert (one["rows"], one["over_one_row"]) == (1, 1.0)
        assert two["over_one_row"] == pytest.approx(two["us"] / one["us"])
        assert two["over_fastest"] == pytest.approx(max(1.0, two["us"] / two["library_us"]))
        with mock.patch.multiple(step_figures, BATCHES=(1, 2, 1000), TREE=3, RUNS=1, STEP_RUNS=1):
            alone, together = figures.batches()
        assert (alone["entries"], together["entries"], together["rows"]) == (1, 2, 6)
        assert alone["least_us"] < together["least_us"]
        assert alone["us"] > 0
        with mock.patch.object(parts.decoder, "max_rows", 16):
            prompt = figures.prefill()
        assert prompt["rows"] == 16
        assert prompt["share_of_products"] > 0
        tail = figures.tail()
        assert (tail["entries"], tail["nodes"]) == (2, 4)
        assert tail["greedy_moves"] == tail["sampled_moves"] == 2  # of each tree one node, the first child's
        assert min(tail[f"{flat}{name}_us"] for flat in ("", "flat_") for name in ("greedy", "sampled")) > 0
        found = figures.engine(tokens=5)
    assert found["off"]["tokens_per_step"] == 1
    assert found["on"]["tokens_per_step"] > 1
    for figures_of in (found["off"], found["on"]):
        gap = 1 - figures_of["device_ms_per_step"] / figures_of["ms_per_step"]
        assert figures_of["host_gap_between_steps"] == pytest.approx(gap)
        assert figures_of["device_ms_per_step"] > 0
    for pool in (parts.decoder.pool.k, parts.decoder.pool.v):  # type: ignore[attr-defined]
        assert torch.isfinite(pool).all()


def test_the_library_computes_the_same() -> None:
    decoder = device_parts().decoder
    assert isinstance(decoder, DeviceDecoder)
    library = library_network(decoder)
    assert library is not None
    assert isinstance(library._weights.layers[0].down, LibraryLinear)
    batch = ForwardBatch.build([BatchEntry([5, 9, 7], [-1, 0, 0], 0, [1])])
    ours = decoder.forward(batch, range(3)).clone()
    step = decoder.buffer.load(batch, range(3))
    library.forward(step)
    torch.testing.assert_close(library.logits(3), ours, atol=2e-2, rtol=2e-2)


def test_the_library_has_no_quantised_layers() -> None:
    decoder = mock.Mock()
    decoder.model.weights.layers = [mock.Mock(linears=[mock.Mock()])]
    assert library_network(decoder) is None
