"""A row's bits equal those of decoding its path token by token, in any batch, split and position."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.gpu.attention_steps import (
    Geometry,
    Layer,
    Shape,
    Step,
    attend,
    dense_oracle,
    path_of,
    plain_decode,
    random_entries,
    with_committed,
)
from tests.kernels.gpu.no_shrinking import NO_SHRINKING
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry

PAGES = 40
SMALL = Geometry(2, 1)


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """The bits to compare; a plain comparison treats -0 as 0."""
    return tensor.contiguous().view(torch.uint8)


def assert_same(a: torch.Tensor, b: torch.Tensor) -> None:
    assert not a.isnan().any()
    assert torch.equal(bits(a), bits(b))


def chain_entry(rows: int, ctx: int, pages: Sequence[int]) -> BatchEntry:
    return BatchEntry([0] * rows, list(range(-1, rows - 1)), ctx, pages)


def check_nodes(device: torch.device, geometry: Geometry, shapes: Sequence[Shape], seed: int, nodes: int) -> None:
    """``nodes`` rows of each entry against plain decode; the last row always is among them."""
    rng = np.random.default_rng(seed)
    entries = random_entries(rng, shapes, PAGES)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, PAGES, seed, device)
    got = attend(layer, step)
    first = 0
    for entry in entries:
        n = len(entry.parents)
        for row in {n - 1, *rng.integers(n, size=nodes - 1).tolist()}:
            assert_same(got[first + row], plain_decode(layer, entry, first, row))
        first += n


@settings(max_examples=5, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 2**31),
    ctx=st.integers(0, 300),
    chain=st.sampled_from([0, 0, 3]),
    drafted=st.integers(0, 14),
    geometry=st.sampled_from([SMALL, replace(SMALL, window=70), Geometry(3, 1, dtype=torch.float32)]),
)
def test_tree_nodes_equal_plain_decode(
    device: torch.device, seed: int, ctx: int, chain: int, drafted: int, geometry: Geometry
) -> None:
    check_nodes(device, geometry, [(ctx, chain, drafted)], seed, 2)


# Contexts in which the last tile of a path, its segment (256) or its block (1024) differs from the root's.
@pytest.mark.parametrize(
    ("geometry", "ctx"),
    [
        (SMALL, 60), (SMALL, 62 + 64), (SMALL, 254), (SMALL, 1020), (replace(SMALL, window=66), 190),
        (Geometry(2, 2, 80, fp8=True), 61), (Geometry(2, 1, 256), 253),
    ],
)  # fmt: skip
def test_paths_that_cross_pages_equal_plain_decode(device: torch.device, geometry: Geometry, ctx: int) -> None:
    check_nodes(device, geometry, [(ctx, 0, 9)], ctx, 2)


def test_tree_of_more_than_64_rows(device: torch.device) -> None:
    rng = np.random.default_rng(3)
    (entry,) = random_entries(rng, [(50, 0, 80)], PAGES, deep=0.8)
    step = Step.of([entry], device)
    layer = Layer.random(SMALL, step.rows, PAGES, 3, device)
    got = attend(layer, step)
    deepest = int(step.depth.argmax())
    for row in (deepest, 80):
        assert_same(got[row], plain_decode(layer, entry, 0, row))


@pytest.mark.parametrize(("geometry", "cut"), [(SMALL, 1), (SMALL, 24), (replace(SMALL, window=50), 17)])
def test_chunks_of_a_prompt(device: torch.device, geometry: Geometry, cut: int) -> None:
    """A chain in one chunk and in two, where the second attends to the first in the cache."""
    ctx, n = 40, 30 if device.type == "cpu" else 180  # interpreted kernels are slow
    pages = [int(p) for p in np.random.default_rng(cut).permutation(PAGES)[:4]]
    layer = Layer.random(geometry, n, PAGES, cut, device)
    whole = attend(layer, Step.of([chain_entry(n, ctx, pages)], device))
    for first, stop in ((0, cut), (cut, n)):
        chunk = Step.of([chain_entry(stop - first, ctx + first, pages)], device)
        assert_same(attend(replace(layer, q=layer.q[first:stop].clone()), chunk), whole[first:stop])


TWO, MORE = [(1100, 0, 2), (330, 0, 0)], [(3072, 0, 2), (2200, 0, 0)]


@pytest.mark.parametrize(("shapes", "window"), [(TWO, 0), (MORE, 0), (MORE, 700)], ids=["two", "more", "window"])
def test_the_split_into_work_does_not_show(device: torch.device, shapes: list[Shape], window: int) -> None:
    """The finest plans, and coarse ones, whose blocks are merged in registers; of two blocks of 1,024 tokens and of
    more, which are summed in other code, all merged or all but the last."""
    geometry, pages = Geometry(3, 3, dtype=torch.float32, window=window), 90
    entries = random_entries(np.random.default_rng(5), shapes, pages)
    step = Step.of(entries, device)
    layer = Layer.random(geometry, step.rows, pages, 5, device)
    results = []
    for processors, coarse in ((1, 1), (10**6, 0)):
        ws = replace(geometry.workspace(device, max_pages=56), processors=processors)
        results.append(attend(layer, step, ws))
        blocks = ws.tile(step.rows, len(entries)).fold_segs > 1  # on AMD a block is one segment, and no plan is coarse
        assert int(ws.header[2]) == (coarse if blocks else 0)
    assert_same(*results)
    oracle = dense_oracle(layer, entries)
    assert (results[0].double().cpu() - oracle).abs().max() <= 1e-5 * oracle.abs().max()


@pytest.mark.parametrize("window", [0, 90])
def test_wide_tiles_do_not_show(device: torch.device, window: int) -> None:
    """Large batches use wider tiles, of eight warps."""
    geometry = Geometry(4, 1, window=window)
    rng = np.random.default_rng(6)
    first, many = random_entries(rng, [(70, 0, 3), (10, 300, 0)], PAGES)
    layer = Layer.random(geometry, 4 + 301, PAGES, 6, device)
    ws = geometry.workspace(device, max_rows=320)
    if ws.chip != "sm_90":
        pytest.skip("only Hopper has wider tiles")
    assert ws.tile(4, 1).block_m < ws.tile(305, 2).block_m
    alone = attend(replace(layer, q=layer.q[:4].clone()), Step.of([first], device), ws)
    if device.type == "cpu":  # a hundredth of the work when interpreted: the same tiles, fewer rows
        many = BatchEntry([0] * 20, many.parents[:20], many.ctx, many.pages)
        step = Step.of([first, many], device).padded(305, 2, 8, garbage=-1)
    else:
        step = Step.of([first, many], device)
    assert_same(attend(layer, step, ws)[:4], alone)


def test_batch_padding_and_positions_do_not_show(device: torch.device) -> None:
    rng = np.random.default_rng(7)
    entries = random_entries(rng, [(70, 0, 5), (200, 0, 0), (3, 9, 2)], PAGES - 8)
    layer = Layer.random(SMALL, 19, PAGES, 7, device)
    ws = SMALL.workspace(device)
    rows = [len(entry.parents) for entry in entries]
    together = attend(layer, Step.of(entries, device), ws)

    order = [2, 0, 1]
    spans = [(sum(rows[:i]), sum(rows[: i + 1])) for i in order]
    shuffled = replace(layer, q=torch.cat([layer.q[a:b] for a, b in spans]))
    got = attend(shuffled, Step.of([entries[i] for i in order], device), ws)
    assert_same(got, torch.cat([together[a:b] for a, b in spans]))

    # Other page ids, more room in the page table, padded rows and entries full of nonsense.
    new_of = torch.from_numpy(rng.permutation(PAGES)).to(device)
    pools = [torch.full_like(layer.k_pool, torch.nan), torch.full_like(layer.v_pool, torch.nan)]
    moved_entries = [entry._replace(pages=[int(new_of[p]) for p in entry.pages]) for entry in entries]
    for entry, moved in zip(entries, moved_entries, strict=True):
        for slot in range(entry.ctx + len(entry.parents)):
            at, lane = slot // PAGE_SIZE, slot % PAGE_SIZE
            for old, new in zip((layer.k_pool, layer.v_pool), pools, strict=True):
                new[moved.pages[at], :, lane] = old[entry.pages[at], :, lane]
    for garbage in (-7, 2**31 - 1):
        q = torch.cat((layer.q, torch.full_like(layer.q[:5], torch.nan)))
        elsewhere = replace(layer, k_pool=pools[0], v_pool=pools[1], q=q)
        got = attend(elsewhere, Step.of(moved_entries, device).padded(24, 5, 30, garbage), ws)
        assert_same(got[:19], together)
        assert got[19:].isnan().all()


@settings(max_examples=4, phases=NO_SHRINKING)
@given(seed=st.integers(0, 2**31), ctx=st.integers(20, 80), accepted=st.integers(1, 6))
def test_accepted_rows_leave_the_same_bits(device: torch.device, seed: int, ctx: int, accepted: int) -> None:
    """After a walk its rows are in the cache: later rows read them through pages instead of lists."""
    rng = np.random.default_rng(seed)
    (entry,) = random_entries(rng, [(ctx, 0, 9)], PAGES, deep=0.7)
    layer = Layer.random(SMALL, 10, PAGES, seed, device)
    got = attend(layer, Step.of([entry], device))
    depth = Step.of([entry], device).depth.tolist()
    row = max(range(10), key=lambda r: (depth[r] <= accepted, depth[r]))
    path = path_of(entry.parents, row)
    for kept in {0, len(path) - 1, len(path) // 2}:
        rest = path[kept:]
        chain = chain_entry(len(rest), entry.ctx + kept, entry.pages)
        later = replace(with_committed(layer, entry, path), q=layer.q[rest].clone())
        assert_same(attend(later, Step.of([chain], device)), got[rest])
