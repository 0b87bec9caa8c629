"""Tree attention: right by the oracle and the torch twin, unharmed by nonsense."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.attention_steps import Geometry, Layer, Step, attend, dense_oracle, random_entries
from tests.kernels.gpu.no_shrinking import NO_SHRINKING
from tests.kernels.gpu.reference import attention as reference
from tests.kernels.gpu.reference import attention as reference_plan
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.tree_attention import compile_cases, tree_attention

PAGES = 24
ERRORS = {torch.float32: 2e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}  # relative to the largest value


def keywords(layer: Layer, step: Step) -> dict[str, Any]:
    return {"step": step, "scale": layer.scale, "window": layer.geometry.window}


def close(got: Tensor, wanted: Tensor, dtype: torch.dtype) -> bool:
    error = (got.double().cpu() - wanted.double().cpu()).abs().max()
    return bool(error <= ERRORS[dtype] * wanted.abs().max())


def by_reference(layer: Layer, step: Step) -> Tensor:
    ws = layer.geometry.workspace(step.depth.device)
    reference_plan.attention_plan(step, ws)
    out = torch.full_like(layer.q, torch.nan)
    reference.tree_attention(layer.q, layer.k_pool, layer.v_pool, out, workspace=ws, **keywords(layer, step))
    return out


@pytest.mark.parametrize(
    "geometry",
    [
        Geometry(4, 2), Geometry(2, 1, 80, window=50), Geometry(2, 2, 96, torch.float32), Geometry(2, 1, 128, window=9),
        Geometry(1, 1, 256), Geometry(8, 1), Geometry(6, 1, dtype=torch.float32), Geometry(2, 1, 128, fp8=True),
        Geometry(2, 1, fp8=True, window=70), Geometry(2, 2, 256, fp8=True),
    ],
)  # fmt: skip
def test_matches_oracle_and_reference(device: torch.device, geometry: Geometry) -> None:
    rng = np.random.default_rng(geometry.head_dim + geometry.heads)
    entries = random_entries(rng, [(126, 0, 5), (0, 2, 1), (64, 0, 0)], PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, PAGES, 1, device)
    oracle = dense_oracle(layer, entries)
    assert close(attend(layer, step), oracle, geometry.dtype)
    assert close(by_reference(layer, step), oracle, geometry.dtype)


@settings(max_examples=6, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 2**31),
    shapes=st.lists(st.tuples(st.integers(0, 280), st.integers(0, 4), st.integers(0, 5)), min_size=1, max_size=2),
    window=st.sampled_from([0, 0, 3, 130]),
)
def test_random_steps(device: torch.device, seed: int, shapes: list[tuple[int, int, int]], window: int) -> None:
    entries = random_entries(np.random.default_rng(seed), shapes, PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(Geometry(2, 1, dtype=torch.float32, window=window), step.rows, PAGES, seed, device)
    assert close(attend(layer, step), dense_oracle(layer, entries), torch.float32)


@pytest.mark.parametrize("kv", ["same", "fp8"])
def test_bfloat16(device: torch.device, kv: str) -> None:
    if device.type == "cpu":
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    geometry = Geometry(8, 2, 128, torch.bfloat16, fp8=kv == "fp8")
    entries = random_entries(np.random.default_rng(2), [(700, 0, 15), (1300, 2, 0)], 40)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, 40, 2, device)
    assert close(attend(layer, step), dense_oracle(layer, entries), torch.bfloat16)


def test_large_scores_and_queries_as_a_view(device: torch.device) -> None:
    """Softmax of scores far from zero; queries that lie within rows of qkv."""
    geometry = Geometry(2, 1, dtype=torch.float32)
    entries = random_entries(np.random.default_rng(3), [(70, 0, 2)], PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, PAGES, 3, device)
    wide = torch.full((step.rows, 4, 64), torch.nan, device=device)
    wide[:, :2] = layer.q * 60
    layer = replace(layer, q=wide[:, :2])
    ws = geometry.workspace(device)
    attention_plan(step, ws)
    out = torch.zeros(step.rows, 2, 64, device=device)
    tree_attention(layer.q, layer.k_pool, layer.v_pool, out, workspace=ws, **keywords(layer, step))
    assert close(out, dense_oracle(layer, entries), torch.float32)


def test_queries_beyond_float16_stay_finite_over_float8_keys(device: torch.device) -> None:
    """Products with float8 keys are float16's."""
    geometry = Geometry(2, 1, dtype=torch.bfloat16, fp8=True)
    entries = random_entries(np.random.default_rng(3), [(70, 0, 2)], PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, PAGES, 3, device)
    layer = replace(layer, q=layer.q * 1e5)
    most = torch.finfo(torch.float16).max
    wanted = dense_oracle(replace(layer, q=layer.q.float().clamp(-most, most)), entries)
    assert close(attend(layer, step), wanted, torch.bfloat16)


def test_unwritten_slots_do_not_show(device: torch.device) -> None:
    geometry = Geometry(2, 1)
    entries = random_entries(np.random.default_rng(4), [(70, 0, 4), (0, 0, 0)], PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, PAGES, 4, device)
    written = torch.zeros(PAGES, 1, 64, 1, dtype=torch.bool)
    for entry in entries:
        for slot in range(entry.ctx + len(entry.parents)):
            written[entry.pages[slot // 64], 0, slot % 64] = True
    pools = [pool.masked_fill(~written.to(device), torch.nan) for pool in (layer.k_pool, layer.v_pool)]
    got = attend(replace(layer, k_pool=pools[0], v_pool=pools[1]), step)
    assert torch.equal(got, attend(layer, step))


def test_invalid_values_on_the_device_cause_no_fault(device: torch.device) -> None:
    """Arrays of any values: kernels end, and write nothing outside their own memory."""
    geometry = Geometry(2, 1)
    rng = np.random.default_rng(5)
    for _ in range(3):
        layer = Layer.random(geometry, 9, PAGES, 5, device)
        ws = geometry.workspace(device, max_rows=9, max_entries=3, max_pages=5, max_branch=2)

        def noise(*shape: int) -> Tensor:
            wild = rng.integers(-(2**31), 2**31, shape)
            return torch.from_numpy(np.where(rng.random(shape) < 0.6, rng.integers(-3, 12, shape), wild)).to(
                device, torch.int32
            )

        attend(layer, Step(noise(9), noise(4), noise(3), noise(9), noise(9), noise(3, 5)), ws)
        assert 0 <= int(ws.header[0]) <= ws.work.shape[0]
        assert int(ws.header[1]) * 9 <= ws.slots


def test_compile_cases_cover_every_tile() -> None:
    """Names are unique, and of every chip, head size and KV type there is a case."""
    names = [case.name for case in compile_cases()]
    assert len(set(names)) == len(names)
    for chip in ("sm_80", "sm_90", "sm_100", "gfx942"):
        for head_dim in (64, 80, 96, 128, 256):
            assert f"attend {chip} {head_dim} bf16 tile 64" in names
    assert "attend sm_90 128 fp8e4nv tile 128 window" in names
