"""The plan of tree attention: as the plain twin makes it, every key of every row read once, room always found."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.attention_steps import Geometry, Step, path_of, random_entries
from tests.kernels.gpu.no_shrinking import NO_SHRINKING
from tests.kernels.gpu.reference import attention as reference
from verify_kernels.forward_batch import BatchEntry
from verify_kernels.gpu.attention_plan import attention_plan
from verify_kernels.gpu.attention_workspace import AttentionWorkspace

PAGES = 4096
SHAPES = st.lists(
    st.tuples(
        st.one_of(st.integers(0, 300), st.integers(900, 3000)),
        st.sampled_from([0, 0, 1, 5, 70]),
        st.one_of(st.integers(0, 12), st.integers(60, 100)),
    ),
    min_size=1,
    max_size=4,
)


def make_step(seed: int, shapes: list[tuple[int, int, int]], device: torch.device) -> tuple[Step, list[BatchEntry]]:
    entries = random_entries(np.random.default_rng(seed), shapes, PAGES, deep=0.6)
    return Step.of(entries, device), entries


def make_workspace(group: int, processors: int, device: torch.device) -> AttentionWorkspace:
    ws = Geometry(2 * group, 2).workspace(device, max_rows=768, max_pages=64, max_branch=101)
    return replace(ws, processors=processors)


@settings(max_examples=12, phases=NO_SHRINKING)
@given(
    seed=st.integers(0, 2**31),
    shapes=SHAPES,
    group=st.sampled_from([1, 4, 6, 8, 64]),
    processors=st.sampled_from([1, 10**6]),
)
def test_equals_the_plain_twin(
    device: torch.device, seed: int, shapes: list[tuple[int, int, int]], group: int, processors: int
) -> None:
    step, _ = make_step(seed, shapes, device)
    kernel, twin = (make_workspace(group, processors, device) for _ in range(2))
    attention_plan(step, kernel)
    reference.attention_plan(step, twin)
    assert kernel.header.tolist() == twin.header.tolist()
    assert torch.equal(kernel.work[: int(twin.header[0])], twin.work[: int(twin.header[0])])
    assert torch.equal(kernel.leaf_of[: step.rows], twin.leaf_of[: step.rows])


def plain_plan(step: Step, ws: AttentionWorkspace) -> list[list[int]]:
    reference.attention_plan(step, ws)
    return ws.work[: int(ws.header[0])].tolist()


def path_rows(ws: AttentionWorkspace, work: list[int]) -> list[int]:
    """Rows of the entry that are the nodes of a work item."""
    start, first, stop, leaf, leaf_depth, diverge = (work[i] for i in (1, 3, 4, 8, 9, 10))
    path: Tensor = ws.path[start + leaf]
    return [int(path[leaf_depth - node]) if node >= diverge else node for node in range(first, stop)]


@settings(max_examples=60)
@given(seed=st.integers(0, 2**31), shapes=SHAPES, group=st.sampled_from([1, 4, 7]), coarse=st.booleans())
def test_every_tile_of_every_row_is_read_once(
    device: torch.device, seed: int, shapes: list[tuple[int, int, int]], group: int, coarse: bool
) -> None:
    """Counted from work items and parents alone; gathered keys are the path's own."""
    step, entries = make_step(seed, shapes, device)
    ws = make_workspace(group, 1 if coarse else 10**6, device)
    read: Counter[tuple[int, int, int]] = Counter()
    splits: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for work in plain_plan(step, ws):
        index, first, stop, gather_stop, split = work[0], work[5], work[6], work[7], work[11]
        entry = entries[index]
        assert work[4] - work[3] <= ws.tile(step.rows, len(entries)).block_m // group
        for row in path_rows(ws, work):
            committed, end = entry.ctx // 64, max(stop, gather_stop)
            last = (entry.ctx + len(path_of(entry.parents, row)) - 1) // 64
            splits.setdefault((index, row), []).append((split, first))
            if end == committed and committed % 4 and last > committed:
                continue  # the short chunk: such a row has its own segment
            read.update((index, row, tile) for tile in range(first, end))
    for index, entry in enumerate(entries):
        for row in range(len(entry.parents)):
            last = (entry.ctx + len(path_of(entry.parents, row)) - 1) // 64
            assert [read[index, row, tile] for tile in range(last + 2)] == [1] * (last + 1) + [0]
            held = sorted(splits[index, row])
            assert len({split for split, _ in held}) == len(held), "two partial sums of a row share a place"
            assert held[-1][0] < int(ws.header[1])
            assert [first for _, first in held[1:]] == sorted(first for _, first in held[1:])


@pytest.mark.parametrize("processors", [1, 10**6])
def test_an_entrys_list_starts_with_its_paths(device: torch.device, processors: int) -> None:
    shapes = [(64 * 40 + 9, 70, 12), (64 * 17, 0, 5), (3, 0, 4)]
    step, entries = make_step(4, shapes, device)
    ws = make_workspace(4, processors, device)
    attention_plan(step, ws)
    works = ws.work[: int(ws.header[0])].tolist()
    assert [work[0] for work in works] == sorted(work[0] for work in works)
    for index, entry in enumerate(entries):
        on_paths = [max(work[6], work[7]) > entry.ctx // 64 for work in works if work[0] == index]
        assert any(on_paths)
        assert on_paths == sorted(on_paths, reverse=True)


@pytest.mark.parametrize("processors", [1, 10**6])
def test_the_largest_steps_fit(device: torch.device, processors: int) -> None:
    """As many rows, entries and pages as the workspace holds; fine plans become coarser when they need more."""
    for max_rows, max_entries, shapes in (
        (96, 1, [(64 * 30, 95, 0)]), (96, 1, [(64 * 30 + 63, 0, 95)]), (8, 8, [(64 * 32 - 1, 0, 0)] * 8),
        (64, 4, [(64 * 31 + 50, 0, 15)] * 4),
    ):  # fmt: skip
        step, _ = make_step(1, shapes, device)
        ws = Geometry(8, 2).workspace(
            device, max_rows=max_rows, max_entries=max_entries, max_pages=33, max_branch=96
        )  # fmt: skip
        ws = replace(ws, processors=processors)
        attention_plan(step, ws)
        header = ws.header.tolist()
        plain_plan(step, ws)
        assert ws.header.tolist() == header
        assert step.rows == max_rows
        assert int(ws.header[0]) < ws.work.shape[0]
        assert int(ws.header[1]) * step.rows <= ws.slots


def test_padding_adds_no_work(device: torch.device) -> None:
    step, _ = make_step(2, [(70, 0, 5), (3, 0, 0)], device)
    ws = make_workspace(2, 4, device)
    attention_plan(step, ws)
    before = ws.work[: int(ws.header[0])].clone()
    padded = step.padded(40, 8, 4, garbage=-9)
    attention_plan(padded, ws)
    assert torch.equal(ws.work[: int(ws.header[0])], before)
