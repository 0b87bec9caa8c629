"""Ranks that synchronise over shared memory: none runs ahead, none sleeps for ever, all learn of a lost rank."""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

from tests.kernels.natives import CACHE, need_compiler
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.shared_ranks import RankLostError, SharedRanks, create_segment, segment_bytes, spin_for

SHAPES = {"seen": (3, 5), "other": (1, 7)}


@contextmanager
def ranks_of(size: int, spin_us: int) -> Iterator[list[SharedRanks]]:
    need_compiler()
    segment = create_segment(segment_bytes(SHAPES))
    try:
        yield [SharedRanks(load_library(CACHE), segment, SHAPES, rank, size, spin_us) for rank in range(size)]
    finally:
        os.close(segment)


@pytest.mark.parametrize(("size", "spin_us"), [(1, 0), (2, 60), (5, 0)])
def test_all_ranks_see_all_writes(size: int, spin_us: int) -> None:
    def run(ranks: SharedRanks) -> bool:
        seen, right = ranks.buffer("seen"), True
        for number in range(1, 400):
            seen[0, ranks.rank] = number
            ranks.meet()
            right &= bool((seen[0, :size] == number).all())
            ranks.meet()  # before any rank writes again
        return right

    with ranks_of(size, spin_us) as ranks, ThreadPoolExecutor(size) as pool:
        assert all(pool.map(run, ranks))
        assert not ranks[0].buffer("other").any()


@pytest.mark.parametrize("spin_us", [0, 60])
def test_a_lost_rank_is_reported_to_waiting_and_arriving_ranks(spin_us: int) -> None:
    with ranks_of(3, spin_us) as ranks, ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(each.meet) for each in ranks[:2]]
        ranks[2].break_up()
        for each in waiting:
            with pytest.raises(RankLostError):
                each.result(30)
        with pytest.raises(RankLostError):
            ranks[0].meet()


def test_buffers_outlive_the_descriptor_and_do_not_overlap() -> None:
    with ranks_of(1, 0) as (rank,):
        pass
    rank.buffer("seen").fill_(2.0)
    assert torch.equal(rank.buffer("other"), torch.zeros(1, 7))


def test_no_thread_spins_if_threads_outnumber_cores() -> None:
    assert spin_for(2, 4, 8) > 0
    assert spin_for(2, 4, 7) == 0
