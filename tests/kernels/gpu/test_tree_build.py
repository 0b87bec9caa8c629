"""Depths and ancestor words against the host's own and against Python integers as bit sets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.device_rows import DeviceRows, random_entries
from tests.kernels.gpu.no_host_read import NoHostRead
from tests.kernels.gpu.recorded_launches import recorded_launches
from verify_kernels.forward_batch import BatchEntry
from verify_kernels.gpu.reference.tree_build import tree_build as reference_tree_build
from verify_kernels.gpu.tree_build import tree_build

RUNS = pytest.mark.parametrize("run", [tree_build, reference_tree_build], ids=["kernel", "reference"])


def built(run, rows: DeviceRows, words: int, max_depth: int = 64) -> tuple[Tensor, Tensor]:  # type: ignore[no-untyped-def]
    depth = torch.full_like(rows.parent, -99)
    anc = torch.full((rows.parent.shape[0], words), -99, dtype=torch.int64, device=depth.device)
    run(rows.parent, rows.entry_of, rows.entry_start, rows.root_row, depth, anc, max_depth=max_depth)
    return depth, anc


def bits(words: Tensor) -> list[int]:
    """Each row's words as one Python integer."""
    return [sum((word & (2**64 - 1)) << 64 * i for i, word in enumerate(row)) for row in words.tolist()]


def ancestors(entry: BatchEntry) -> list[int]:
    sets: list[int] = []
    for row, parent in enumerate(entry.parents):
        sets.append(1 << row | (sets[parent] if parent >= 0 else 0))
    return sets


shapes = st.lists(
    st.tuples(st.integers(0, 300), st.sampled_from([0, 1, 5, 63, 70]), st.integers(-1, 30)).filter(
        lambda s: sum(s[1:]) >= 0
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=25)
@given(shapes=shapes, seed=st.integers(0, 999), pad=st.integers(0, 5), words=st.integers(2, 5))
@RUNS
def test_matches_host(device, run, shapes, seed, pad, words):  # type: ignore[no-untyped-def]
    entries, roots = random_entries(np.random.default_rng(seed), shapes, 64)
    rows = DeviceRows.build(entries, roots, device, pad_rows=pad, pad_entries=pad // 2)
    depth, anc = built(run, rows, words, max_depth=20)
    want = [word for entry in entries for word in ancestors(entry)]
    assert bits(anc[: rows.live]) == want
    assert torch.equal(depth[: rows.live], rows.depth[: rows.live])
    assert not depth[rows.live :].any()
    assert not anc[rows.live :].any()


@RUNS
def test_a_long_chunk_with_a_tree_above(device, run):  # type: ignore[no-untyped-def]
    entries, roots = random_entries(np.random.default_rng(0), [(5, 600, 20), (0, 1, 3)], 64)
    rows = DeviceRows.build(entries, roots, device)
    depth, anc = built(run, rows, 10, max_depth=20)
    assert bits(anc) == ancestors(entries[0]) + ancestors(entries[1])
    assert torch.equal(depth, rows.depth)


@RUNS
def test_a_deep_tree_is_a_chain_too(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([0] * 64, list(range(-1, 63)), 0, [0])
    depth, anc = built(run, DeviceRows.build([entry], [0], device), 1, max_depth=63)
    assert depth.tolist() == list(range(64))
    assert bits(anc) == [2 ** (row + 1) - 1 for row in range(64)]


@RUNS
def test_rows_beyond_the_words_have_none_of_their_own(device, run):  # type: ignore[no-untyped-def]
    entries, roots = random_entries(np.random.default_rng(3), [(0, 60, 20)], 4)
    rows = DeviceRows.build(entries, roots, device)
    depth, anc = built(run, rows, 1)
    assert bits(anc) == [word & (2**64 - 1) for word in ancestors(entries[0])]
    assert torch.equal(depth, rows.depth)


@RUNS
def test_too_deep_is_padding(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([0] * 7, [-1, 0, 1, 2, 3, 1, 5], 0, [0])
    depth, anc = built(run, DeviceRows.build([entry], [1], device), 1, max_depth=2)
    assert depth.tolist() == [0, 1, 2, 3, 0, 2, 3]
    assert bits(anc) == [1, 3, 7, 15, 0, 35, 99]


@RUNS
def test_parents_that_lead_nowhere_do_no_harm(device, run):  # type: ignore[no-untyped-def]
    entry = BatchEntry([0] * 6, [-1, 0, 1, 2, 3, 4], 0, [0])
    rows = DeviceRows.build([entry, entry], [0, 0], device)
    rows.parent[:6] = torch.tensor([-1, 1, 5, -4, 2**30, 3], dtype=torch.int32)
    depth, anc = built(run, rows, 1)
    assert bits(anc[6:]) == ancestors(entry)
    assert depth[6:].tolist() == list(range(6))
    assert bits(anc[:6]) == [1, 2, 4, 8, 16, 32 | 8]  # a climb ends where the next parent is none


def test_nothing_is_read_on_the_host(device: torch.device) -> None:
    entries, roots = random_entries(np.random.default_rng(0), [(5, 3, 6)], 8)
    rows = DeviceRows.build(entries, roots, device)
    with NoHostRead(device.type):
        built(tree_build, rows, 1)


def test_no_rows_is_no_work(device: torch.device) -> None:
    none, one = torch.empty(0, dtype=torch.int32, device=device), torch.zeros(1, dtype=torch.int32, device=device)
    anc = torch.empty(0, 1, dtype=torch.int64, device=device)
    with recorded_launches() as launches:
        tree_build(none, none, one, none, none.clone(), anc, max_depth=3)
    assert not launches


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parent": torch.zeros(3).long()}, "parent"),
        ({"parent": torch.zeros(3, 1).int()}, "parent"),
        ({"entry_of": torch.zeros(2).int()}, "entry_of"),
        ({"entry_start": torch.zeros(2).int()}, "entry_start"),
        ({"root_row": torch.zeros(2, 1).int()}, "root_row"),
        ({"root_row": torch.zeros(4).int()[::2]}, "root_row"),
        ({"depth": torch.zeros(4).int()}, "depth"),
        ({"anc": torch.zeros(3, 0).long()}, "anc"),
        ({"anc": torch.zeros(3, 1).int()}, "anc"),
        ({"anc": torch.zeros(3).long()}, "anc"),
        ({"anc": torch.zeros(3, 1, device="meta").long()}, "anc"),
        ({"max_depth": -1}, "max_depth"),
    ],
)
def test_names_the_argument_at_fault(change: dict[str, Tensor | int], message: str) -> None:
    rows = {name: torch.zeros(3).int() for name in ("parent", "entry_of", "depth")}
    entries = {"entry_start": torch.zeros(3).int(), "root_row": torch.zeros(2).int()}
    given = {**rows, **entries, "anc": torch.zeros(3, 1).long(), "max_depth": 4, **change}
    with pytest.raises(ValueError, match=rf"^{message}: "):
        tree_build(**given)  # type: ignore[arg-type]
