"""Acceptance on the device against the host's: a dictionary of children, followed token by token."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.device_rows import DeviceRows, choices, on, pool_slot, random_entries
from tests.kernels.gpu.reference.accept import accept as reference_accept
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry
from verify_kernels.gpu.accept import MAX_NODES, AcceptResult, accept

RUNS = pytest.mark.parametrize("run", [accept, reference_accept], ids=["kernel", "reference"])
N_PAGES = 64


@dataclass(slots=True)
class Accepted:
    """What the host's verifier returns for one entry."""

    rows: list[int]
    emitted: list[int]
    moves: list[tuple[int, int]]


def accepted(entry: BatchEntry, root: int, sampled: list[int], limit: int = 1 << 30) -> Accepted:
    if root < 0:
        return Accepted([], [], [])
    children: dict[tuple[int, int], int] = {}
    for row in range(root + 1, len(entry.tokens)):
        children.setdefault((entry.parents[row], entry.tokens[row]), row)
    rows, emitted = [root], []
    while True:
        emitted.append(sampled[rows[-1]])
        child = children.get((rows[-1], emitted[-1]))
        if child is None or len(rows) > limit:
            break
        rows.append(child)
    moves = [
        (pool_slot(entry, row), pool_slot(entry, root + depth)) for depth, row in enumerate(rows) if row != root + depth
    ]
    return Accepted(rows, emitted, moves)


def launch(run, rows: DeviceRows, sampled: Tensor, depth: int, **given) -> AcceptResult:  # type: ignore[no-untyped-def]
    result = AcceptResult.allocate(rows.entry_ctx.shape[0], depth, rows.tokens.device)
    for name in AcceptResult.__dataclass_fields__:
        getattr(result, name).fill_(-77)
    starts = rows.entry_start[:-1] + rows.root_row  # every row has a sample
    given = {"n_pages": N_PAGES, "result": result, "sample_start": starts} | given
    run(rows, rows.root_row, rows.tokens, sampled, **given)
    return given["result"]


def check(result: AcceptResult, entry: int, want: Accepted) -> None:
    count = int(result.counts[entry])
    assert count == len(want.rows)
    assert result.rows[entry].tolist() == want.rows + [-1] * (result.rows.shape[1] - count)
    assert result.emitted[entry].tolist() == want.emitted + [-1] * (result.rows.shape[1] - count)
    source, target = result.move_source[entry].tolist(), result.move_target[entry].tolist()
    pairs = [(a, b) for a, b in zip(source, target, strict=True) if (a, b) != (-1, -1)]
    assert pairs == want.moves
    n_moves = int(result.n_moves[entry])
    assert n_moves == (count - 1 if want.moves else 0)
    assert all((a, b) == (-1, -1) for a, b in zip(source[n_moves:], target[n_moves:], strict=True))


# (ctx, chain, nodes), nodes -1 for no tree; contexts near page ends.
shape = st.tuples(st.integers(0, 3) | st.integers(50, 130), st.sampled_from([0, 1, 4, 40]), st.integers(-1, 30)).filter(
    lambda drawn: drawn[1] + drawn[2] >= 0
)


@settings(max_examples=40)
@given(shapes=st.lists(shape, min_size=1, max_size=4), seed=st.integers(0, 9999), pad=st.integers(0, 3))
@RUNS
def test_accepts_like_the_host(device, run, shapes, seed, pad):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    entries, roots = random_entries(rng, shapes, N_PAGES, vocab=6)
    rows = DeviceRows.build(entries, roots, device, pad_rows=pad, pad_entries=pad)
    sampled = [choices(rng, entry, root, 6) for entry, root in zip(entries, roots, strict=True)]
    flat = on(device, [token for tokens in sampled for token in tokens] + [0] * pad)
    result = launch(run, rows, flat, depth=31)
    for i, (entry, root) in enumerate(zip(entries, roots, strict=True)):
        check(result, i, accepted(entry, root, sampled[i]))
    for i in range(len(entries), len(entries) + pad):  # no rows: nothing happens, nothing is filled
        check(result, i, Accepted([], [], []))


@settings(max_examples=15)
@given(shapes=st.lists(shape, min_size=1, max_size=3), seed=st.integers(0, 9999))
@RUNS
def test_only_trees_need_be_sampled(device, run, shapes, seed):  # type: ignore[no-untyped-def]
    rng = np.random.default_rng(seed)
    entries, roots = random_entries(rng, shapes, N_PAGES, vocab=4)
    rows = DeviceRows.build(entries, roots, device)
    sampled = [choices(rng, entry, root, 4) for entry, root in zip(entries, roots, strict=True)]
    starts, packed = [], [9]
    for tokens, root in zip(sampled, roots, strict=True):
        starts.append(len(packed) if root >= 0 else -5)
        packed += tokens[root:] if root >= 0 else []
    result = launch(run, rows, on(device, packed), depth=31, sample_start=on(device, starts))
    for i, (entry, root) in enumerate(zip(entries, roots, strict=True)):
        check(result, i, accepted(entry, root, sampled[i]))


CHAIN = BatchEntry([5, 6, 7, 8, 9, 7], [-1, 0, 1, 2, 3, 1], 62, [3, 1])


@RUNS
@pytest.mark.parametrize("depth", [0, 1, 2, 3, 4, 9])
def test_a_path_is_no_longer_than_its_buffer(device, run, depth):  # type: ignore[no-untyped-def]
    rows = DeviceRows.build([CHAIN], [0], device)
    sampled = [6, 7, 8, 9, 4, 4]
    check(launch(run, rows, on(device, sampled), depth), 0, accepted(CHAIN, 0, sampled, limit=depth))


@RUNS
@pytest.mark.parametrize("row", [MAX_NODES, MAX_NODES + 1])
def test_rows_past_the_largest_tree_are_not_nodes(device, run, row):  # type: ignore[no-untyped-def]
    tokens, root = list(range(MAX_NODES + 3)), 1
    wide = BatchEntry(tokens, [-1, 0] + [root] * (len(tokens) - 2), 50, [3, 1])
    sampled = [0, row, *[0] * (len(tokens) - 2)]
    result = launch(run, DeviceRows.build([wide], [root], device), on(device, sampled), 8)
    assert result.rows[0, :2].tolist() == [root, row if row < root + MAX_NODES else -1]


@RUNS
@pytest.mark.parametrize("at", [0, 2])
def test_a_row_without_a_usable_logit_ends_the_path(device, run, at):  # type: ignore[no-untyped-def]
    rows = DeviceRows.build([CHAIN], [0], device)
    rows.tokens[3] = -1  # no node has "no token", whatever its value
    sampled = [6, 7, 8, 9, 4, 4]
    sampled[at] = -1
    result = launch(run, rows, on(device, sampled), 5)
    assert int(result.counts[0]) == at + 1
    assert result.emitted[0].tolist() == [*sampled[: at + 1], *[-1] * (5 - at)]


@RUNS
def test_of_equal_siblings_the_first_counts(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([5, 6, 6, 6, 7], [-1, 0, 0, 0, 1], 0, [0])
    sampled = [6, 7, 1, 2, 3]
    check(launch(run, DeviceRows.build([entry], [0], device), on(device, sampled), 4), 0, accepted(entry, 0, sampled))


@RUNS
def test_invalid_parents_are_ignored(device, run):  # type: ignore[no-untyped-def]
    rows = DeviceRows.build([CHAIN], [0], device)
    rows.tokens.fill_(6)
    rows.parent.copy_(on(device, [0, 1, 0, 2, 5, -9]))
    result = launch(run, rows, on(device, [6] * 6), 5)
    assert result.rows[0].tolist() == [0, 2, 3, -1, -1, -1]  # row 1 is its own parent, row 4's comes after it


@RUNS
def test_slots_without_a_page_are_not_moved(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([5, 8, 6, 9, 7], [-1, 0, 0, 2, 2], 62, [1, 2])  # rows 2, 4 in the second page, go to 63, 64
    rows = DeviceRows.build([entry], [0], device)
    sampled = on(device, [6, 0, 7, 0, 0])
    for pages in ([1, -1], [1, N_PAGES], [-3, 2]):
        rows.page_table.copy_(on(device, pages)[None])
        result = launch(run, rows, sampled, 4)
        assert result.rows[0].tolist() == [0, 2, 4, -1, -1]
        source, target = [2 * 64, 2 * 64 + 2, -1, -1], [64 + 63, 2 * 64, -1, -1]
        known = [page in range(N_PAGES) for page in pages]
        assert result.move_source[0].tolist() == [slot if known[1] else -1 for slot in source]
        assert result.move_target[0].tolist() == [
            slot if known[i] else -1 for slot, i in zip(target, [0, 1, 0, 0], strict=True)
        ]


@RUNS
def test_slots_past_the_table_are_not_moved(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([5, 8, 6], [-1, 0, 0], 0, [1])
    rows = DeviceRows.build([entry, entry], [0, 0], device)
    sampled = on(device, [6, 0, 0] * 2)
    for ctx in (PAGE_SIZE, -PAGE_SIZE):  # next in memory is the other entry's page
        rows.entry_ctx[0] = ctx
        result = launch(run, rows, sampled, 2)
        assert result.rows[0].tolist() == [0, 2, -1]
        assert (result.move_source[0] == -1).all()
        assert (result.move_target[0] == -1).all()
        assert result.move_source[1].tolist() == [PAGE_SIZE + 2, -1]


@RUNS
def test_one_copy_returns_what_the_host_reads(device, run):  # type: ignore[no-untyped-def]
    rows = DeviceRows.build([CHAIN, CHAIN], [0, 2], device)
    sampled = on(device, [6, 7, 0, 9, 4, 4] * 2)
    result = AcceptResult.allocate(2, 3, device)
    launch(run, rows, sampled, 3, result=result)
    parts = (result.counts, result.rows, result.emitted)
    assert torch.equal(result.for_host, torch.cat([part.flatten() for part in parts]))
    assert result.for_host.data_ptr() == result.counts.data_ptr()
