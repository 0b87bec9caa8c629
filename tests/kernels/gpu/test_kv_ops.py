"""Norm, rotary embedding and KV write against transformers' and torch's own formulas, slot by slot."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import rms_norm
from transformers.models.llama.modeling_llama import rotate_half

from specdec.models.config import RopeConfig
from specdec.models.decoder import rope_tables
from tests.kernels.gpu.device_rows import DeviceRows, on, random_entries
from tests.kernels.gpu.reference.attention import write_kv as reference_write_kv
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.attention_workspace import HEAD_DIMS
from verify_kernels.gpu.kernel_launch import FP8, StepRows
from verify_kernels.gpu.kv_ops import write_kv

RUNS = pytest.mark.parametrize("run", [write_kv, reference_write_kv], ids=["kernel", "reference"])
EPS = 1e-6
N_PAGES = 12
POSITIONS = 400
# The interpreter truncates bfloat16, and a GPU rounds it.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
UNTOUCHED = 7.0


@dataclass(slots=True)
class Case:
    """One launch: rows, weights, pools filled with UNTOUCHED."""

    rows: DeviceRows
    qkv: Tensor
    q_out: Tensor
    k_pool: Tensor
    v_pool: Tensor
    cos: Tensor
    sin: Tensor
    extra: dict[str, Any]

    def run(self, run, **change) -> None:  # type: ignore[no-untyped-def]
        given = {name: getattr(self, name) for name in ("qkv", "q_out", "k_pool", "v_pool", "cos", "sin")}
        step = StepRows(**{n.name: change.pop(n.name, getattr(self.rows, n.name)) for n in fields(StepRows)})
        run(**{**given, "step": step, **self.extra, **change})


def make(
    rows: DeviceRows,
    heads: tuple[int, int] = (3, 1),
    head_dim: int = 64,
    dtype: torch.dtype = torch.float32,
    pool: torch.dtype = torch.float32,
    norms: bool = False,
    seed: int = 0,
) -> Case:
    device, n = rows.tokens.device, rows.tokens.shape[0]
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    shape = (N_PAGES, heads[1], PAGE_SIZE, head_dim)
    cos, sin = rope_tables(RopeConfig(10000.0), head_dim, POSITIONS, local=False)
    extra: dict[str, Any] = {"eps": EPS}
    if norms:
        extra |= {"q_norm": random(head_dim).to(dtype), "k_norm": random(head_dim).to(dtype)}
    return Case(
        rows,
        random(n, (heads[0] + 2 * heads[1]) * head_dim).to(dtype),
        torch.full((n, heads[0], head_dim), UNTOUCHED, dtype=dtype, device=device),
        torch.full(shape, UNTOUCHED, device=device).to(pool),
        torch.full(shape, UNTOUCHED, device=device).to(pool),
        cos.to(device),
        sin.to(device),
        extra,
    )


def oracle(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v of the live rows, float64 [live, heads, head_dim], rotated as transformers does it."""
    live, (heads, head_dim), kv_heads = case.rows.live, case.q_out.shape[1:], case.k_pool.shape[1]
    packed = case.qkv[:live].double().view(live, heads + 2 * kv_heads, head_dim)
    q, k, v = packed.split([heads, kv_heads, kv_heads], dim=1)
    if "q_norm" in case.extra:
        q = rms_norm(q, [head_dim], case.extra["q_norm"].double(), EPS)
        k = rms_norm(k, [head_dim], case.extra["k_norm"].double(), EPS)
    position = case.rows.entry_ctx[case.rows.entry_of[:live]] + case.rows.depth[:live]
    inverse = 10000.0 ** -(torch.arange(0, head_dim, 2, dtype=torch.float64, device=q.device) / head_dim)
    angle = (position[:, None] * inverse).repeat(1, 2)[:, None]
    return (*((x * angle.cos() + rotate_half(x) * angle.sin()) for x in (q, k)), v)


def slots_of(case: Case) -> tuple[Tensor, Tensor]:
    """Page and lane of each live row."""
    pairs = []
    for row in range(case.rows.live):
        entry = int(case.rows.entry_of[row])
        slot = int(case.rows.entry_ctx[entry]) + row - int(case.rows.entry_start[entry])
        pairs.append((int(case.rows.page_table[entry, slot // PAGE_SIZE]), slot % PAGE_SIZE))
    page, lane = zip(*pairs, strict=True)
    return torch.tensor(page), torch.tensor(lane)


def check(case: Case) -> None:
    """Check that all live rows are in place, and that everything else is unchanged."""
    q, k, v = oracle(case)
    tolerance = TOLERANCE[case.q_out.dtype]
    live, (page, lane) = case.rows.live, slots_of(case)
    torch.testing.assert_close(case.q_out[:live].double(), q, rtol=tolerance, atol=tolerance)
    assert (case.q_out[live:] == UNTOUCHED).all()
    tolerance = max(TOLERANCE[case.k_pool.dtype], 1e-6)
    for pool, want in ((case.k_pool, k), (case.v_pool, v)):
        torch.testing.assert_close(pool[page, :, lane].double(), want, rtol=tolerance, atol=tolerance)
        rest = pool.clone()
        rest[page, :, lane] = UNTOUCHED
        assert (rest == UNTOUCHED).all()


def device_rows(
    device: torch.device, seed: int, shapes: list[tuple[int, int, int]], pad: int = 0, pad_entries: int = 0
) -> DeviceRows:
    entries, roots = random_entries(np.random.default_rng(seed), shapes, N_PAGES)
    return DeviceRows.build(entries, roots, device, pad_rows=pad, pad_entries=pad_entries)


# (ctx, chain, nodes): contexts so that rows straddle a page's end.
shape = st.tuples(st.sampled_from([0, 1, 60, 63, 64, 126]), st.integers(0, 4), st.integers(0, 4))


@settings(max_examples=10)
@given(
    shapes=st.lists(shape, min_size=1, max_size=2),
    heads=st.sampled_from([(1, 1), (3, 1), (6, 2), (7, 7), (5, 3)]),
    head_dim=st.sampled_from([64, 80]),
    dtypes=st.sampled_from(
        [(torch.float32, torch.float32), (torch.float16, torch.float16), (torch.float16, torch.bfloat16)]
    ),
    norms=st.booleans(),
    seed=st.integers(0, 999),
    pad=st.integers(0, 2),
)
@RUNS
def test_rows_are_rotated_and_written(device, run, shapes, heads, head_dim, dtypes, norms, seed, pad):  # type: ignore[no-untyped-def]
    case = make(device_rows(device, seed, shapes, pad, pad), heads, head_dim, *dtypes, norms, seed)
    case.run(run)
    check(case)


@RUNS
@pytest.mark.parametrize("norms", [False, True])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_head_size(device, run, head_dim, norms):  # type: ignore[no-untyped-def]
    case = make(device_rows(device, 1, [(63, 0, 1)]), (3, 2), head_dim, torch.float16, torch.float16, norms)
    case.run(run)
    check(case)


@RUNS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_rows_and_pool_of_other_types(device, run, dtype):  # type: ignore[no-untyped-def]
    case = make(device_rows(device, 2, [(5, 1, 1)]), (2, 1), 64, dtype, torch.bfloat16, norms=True)
    case.run(run)
    check(case)


@RUNS
def test_q_can_be_rotated_in_place(device, run):  # type: ignore[no-untyped-def]
    case = make(device_rows(device, 3, [(62, 2, 2)]), (5, 2), 80, norms=True)
    original = case.qkv.clone()
    in_place = case.qkv[:, : 5 * 80].unflatten(1, (5, 80))
    case.run(run, q_out=in_place)
    assert torch.equal(case.qkv[:, 5 * 80 :], original[:, 5 * 80 :])
    case.q_out, case.qkv = in_place.clone(), original
    check(case)


def first_row(device: torch.device) -> Case:
    """A row at position 0, where nothing turns, and a float8 pool of three heads."""
    rows = device_rows(device, 4, [(0, 0, 0)])
    rows.entry_ctx.fill_(0)
    return make(rows, (1, 3), 64, torch.float32, FP8)


@RUNS
def test_float8_pool_stores_what_it_can_hold_exactly(device, run):  # type: ignore[no-untyped-def]
    case = first_row(device)
    bits = torch.arange(3 * 64, dtype=torch.int32).remainder(0x7F).to(torch.uint8)  # all finite ones above zero
    values = bits.view(3, 64).view(FP8).float().to(device)
    normal = values.abs() >= 2.0**-6  # the interpreter has no subnormal e4m3
    case.qkv[0, 64:] = torch.cat([values, -values]).flatten()
    case.run(run)
    page = int(case.rows.page_table[0, 0])
    assert torch.equal(case.k_pool[page, :, 0].float()[normal], values[normal])
    assert torch.equal(case.v_pool[page, :, 0].float()[normal], -values[normal])


@RUNS
def test_float8_pool_keeps_large_values_finite(device, run):  # type: ignore[no-untyped-def]
    case = first_row(device)
    case.qkv[0, 64:].view(2, 3, 64).copy_((torch.arange(64, device=device) % 2 * 2 - 1) * 465.0)
    case.qkv[0, 64 + 3 * 64] = -torch.inf  # of v, which is not rotated
    case.run(run)
    page = int(case.rows.page_table[0, 0])
    for pool in (case.k_pool, case.v_pool):
        assert torch.equal(pool[page, :, 0].float(), (torch.arange(64, device=device) % 2 * 896 - 448.0).expand(3, 64))


def test_float8_rounds_like_torch(device: torch.device) -> None:
    if device.type != "cuda":
        pytest.skip("the interpreter rounds float8 in its own way")
    rows = device_rows(device, 5, [(60, 3, 5), (0, 1, 2)])
    one, two = (make(rows, (4, 2), 128, torch.bfloat16, FP8, norms=True) for _ in "ab")
    one.qkv[0, -1] = two.qkv[0, -1] = torch.nan
    one.run(write_kv)
    two.run(reference_write_kv)
    assert torch.equal(one.v_pool.view(torch.uint8), two.v_pool.view(torch.uint8))
    torch.testing.assert_close(one.k_pool.float(), two.k_pool.float(), rtol=0.13, atol=0.01)


@pytest.mark.parametrize("head_dim", [80, 128])
def test_a_row_has_the_same_bits_in_any_batch(device: torch.device, head_dim: int) -> None:
    """An entry alone, and in a batch with padding and broken neighbours."""
    shapes = [(62, 1, 3), (3, 0, 2)]
    crowd = make(device_rows(device, 6, shapes, 3, 2), (3, 2), head_dim, torch.float16, torch.float16, True)
    alone = make(device_rows(device, 6, shapes[:1]), (3, 2), head_dim, torch.float16, torch.float16, True)
    live = alone.rows.live
    crowd.qkv[:live], crowd.qkv[live:] = alone.qkv, torch.nan
    alone.extra = crowd.extra
    crowd.run(write_kv)
    alone.run(write_kv)
    assert torch.equal(crowd.q_out[:live], alone.q_out)
    here, there = slots_of(alone), slots_of(crowd)
    for one, other in ((alone.k_pool, crowd.k_pool), (alone.v_pool, crowd.v_pool)):
        assert torch.equal(one[here[0], :, here[1]], other[there[0][:live], :, there[1][:live]])


@RUNS
@pytest.mark.parametrize("page", [-1, N_PAGES, 2**31 - 1])
def test_a_row_without_a_page_is_not_written(device, run, page):  # type: ignore[no-untyped-def]
    rows = device_rows(device, 7, [(63, 0, 2)])
    case = make(rows)
    first, good = rows.page_table[0].tolist()
    rows.page_table[0, 0] = page
    assert int(rows.page_table[0, 0]) == page  # has been written: the kernel may read it before it waits
    case.run(run)
    rest = case.k_pool.clone()
    rest[good, :, :2] = UNTOUCHED
    assert (rest == UNTOUCHED).all()
    assert (case.k_pool[good, :, :2] != UNTOUCHED).any()
    assert (case.q_out != UNTOUCHED).any(-1).all()
    assert first != good


@RUNS
def test_slots_past_the_table_and_invalid_positions_are_ignored(device, run):  # type: ignore[no-untyped-def]
    rows = device_rows(device, 8, [(62, 0, 1), (0, 0, 1)])
    case = make(rows)
    rows.entry_ctx[0] = PAGE_SIZE + 10  # past its pages: next in memory is the other entry's
    rows.depth[2:] = on(device, [-5, 2**30])
    page = int(rows.page_table[1, 0])  # all has been written then: the kernel may read it before it waits
    case.run(run)
    rest = case.k_pool.clone()
    rest[page, :, :2] = UNTOUCHED
    assert (rest == UNTOUCHED).all()
    q = case.qkv[2, :64]
    torch.testing.assert_close(case.q_out[2, 0], q)  # at position 0, where the rotation is the identity
    assert case.q_out.isfinite().all()
