"""Moves of accepted KV write the values of plain decode to the positions of plain decode, and change nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.kernels.gpu.device_rows import DeviceRows, choices, on, pool_slot, random_entries
from tests.kernels.gpu.no_host_read import NoHostRead
from tests.kernels.gpu.reference.attention import move_kv as reference_move_kv
from verify_kernels.forward_batch import PAGE_SIZE
from verify_kernels.gpu.accept import AcceptResult, accept
from verify_kernels.gpu.kv_ops import move_kv

RUNS = pytest.mark.parametrize("run", [move_kv, reference_move_kv], ids=["kernel", "reference"])
N_PAGES = 9


def pools(
    device: torch.device, dtype: torch.dtype = torch.float16, layers: int = 2, heads: int = 3, head_dim: int = 80
) -> tuple[Tensor, Tensor]:
    """K and V of random bits, so that nothing but a bitwise copy will do."""
    generator = torch.Generator().manual_seed(0)
    shape = (layers, N_PAGES, heads, PAGE_SIZE, head_dim * dtype.itemsize)
    return tuple(  # type: ignore[return-value]
        torch.randint(0, 256, shape, generator=generator).to(torch.uint8).view(dtype).to(device) for _ in "kv"
    )


def bytes_of(pool: Tensor) -> Tensor:
    """[layers, slots, heads, bytes] copy of the bits."""
    return pool.view(torch.uint8).transpose(2, 3).flatten(1, 2).clone()


def table(device: torch.device, moves: list[list[tuple[int, int]]], width: int) -> tuple[Tensor, Tensor, Tensor]:
    """source, target, n_moves; lists are filled up with pairs that must not be looked at."""
    full = [[*pairs, *[(1, 2)] * (width - len(pairs))] for pairs in moves]
    both = torch.tensor(full, dtype=torch.int32).view(len(moves), width, 2).to(device)
    return both[..., 0].contiguous(), both[..., 1].contiguous(), on(device, [len(pairs) for pairs in moves])


def moved(bits: Tensor, moves: list[list[tuple[int, int]]]) -> Tensor:
    """The oracle: all of an entry's rows are lifted out, then put down."""
    for pairs in moves:
        if pairs:
            source, target = zip(*pairs, strict=True)
            bits[:, list(target)] = bits[:, list(source)].clone()
    return bits


def check(run, device: torch.device, moves: list[list[tuple[int, int]]], **given) -> None:  # type: ignore[no-untyped-def]
    k, v = pools(device, **given)
    want = moved(bytes_of(k), moves), moved(bytes_of(v), moves)
    run(k, v, *table(device, moves, max(map(len, moves)) + 2))
    assert torch.equal(bytes_of(k), want[0])
    assert torch.equal(bytes_of(v), want[1])


@RUNS
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("head_dim", [64, 80, 96, 128, 256])
def test_every_row_width(device, run, dtype, head_dim):  # type: ignore[no-untyped-def]
    check(run, device, [[(70, 69), (75, 70)], [(3, 2)]], dtype=dtype, head_dim=head_dim, layers=1, heads=1)


@RUNS
@pytest.mark.parametrize("heads", [1, 3, 5])
def test_all_layers_and_heads(device, run, heads):  # type: ignore[no-untyped-def]
    check(run, device, [[(70, 69), (75, 70)]], layers=3, heads=heads, head_dim=64)


@RUNS
@pytest.mark.parametrize("shift", [1, 2, 7, 8, 9])
@pytest.mark.parametrize("length", [1, 7, 8, 9, 30])
def test_chains_that_overlap_themselves(device, run, shift, length):  # type: ignore[no-untyped-def]
    """Each row moves to a slot still in use. Pages are out of order, so that slots descend across them."""
    logical = [5 * PAGE_SIZE + 50 + i for i in range(14)] + [PAGE_SIZE + i for i in range(50)]
    check(run, device, [[(logical[i + shift], logical[i]) for i in range(length)]], layers=1, heads=2, head_dim=64)


@settings(max_examples=12)
@given(
    shapes=st.lists(st.tuples(st.integers(50, 63), st.integers(0, 4), st.integers(-1, 30)), min_size=1, max_size=3),
    seed=st.integers(0, 9999),
)
def test_accepted_rows_are_stored_where_plain_decode_stores_them(device, shapes, seed):  # type: ignore[no-untyped-def]
    """accept and move_kv together: the walk's row at depth d moves to slot root + d, and the rest of the pool is
    unchanged."""
    rng = np.random.default_rng(seed)
    shapes = [(ctx, max(chain, 1), nodes) for ctx, chain, nodes in shapes]
    entries, roots = random_entries(rng, shapes, N_PAGES, vocab=3)
    rows = DeviceRows.build(entries, roots, device, pad_rows=2, pad_entries=1)
    sampled = [token for entry, root in zip(entries, roots, strict=True) for token in choices(rng, entry, root, 3)]
    k, v = pools(device, layers=2, heads=2, head_dim=64)
    before = bytes_of(k), bytes_of(v)
    result = AcceptResult.allocate(len(entries) + 1, 12, device)
    with NoHostRead(device.type):
        flat = on(device, [*sampled, 0, 0])
        starts = rows.entry_start[:-1] + rows.root_row
        accept(rows, rows.root_row, rows.tokens, flat, starts, result, n_pages=N_PAGES)
        move_kv(k, v, result.move_source, result.move_target, result.n_moves)
    touched = set()
    for i, (entry, root) in enumerate(zip(entries, roots, strict=True)):
        for depth, row in enumerate(result.rows[i, : int(result.counts[i])].tolist()):
            target = pool_slot(entry, root + depth)
            touched.add(target)
            for now, then in zip((k, v), before, strict=True):
                assert torch.equal(bytes_of(now)[:, target], then[:, pool_slot(entry, row)])
    rest = [slot for slot in range(N_PAGES * PAGE_SIZE) if slot not in touched]
    for now, then in zip((k, v), before, strict=True):
        assert torch.equal(bytes_of(now)[:, rest], then[:, rest])


@RUNS
def test_invalid_pairs_and_counts_are_ignored(device, run):  # type: ignore[no-untyped-def]
    slots = N_PAGES * PAGE_SIZE
    k, v = pools(device, layers=1, heads=1, head_dim=64)
    want = moved(bytes_of(k), [[(9, 8)]]), moved(bytes_of(v), [[(9, 8)]])
    strange = [(-1, 3), (4, -1), (slots, 5), (6, slots), (7, 7), (2**31 - 1, -(2**31))]
    source, target, _ = table(device, [[*strange, (9, 8)], [(11, 10)] * 7, [(13, 12)] * 7], 7)
    run(k, v, source, target, on(device, [100, 0, -5]))
    assert torch.equal(bytes_of(k), want[0])
    assert torch.equal(bytes_of(v), want[1])


@RUNS
def test_no_capacity_for_moves_is_no_work(device, run):  # type: ignore[no-untyped-def]
    k, v = pools(device, layers=1, heads=1, head_dim=64)
    before = bytes_of(k)
    run(k, v, *table(device, [[], []], 0))
    assert torch.equal(bytes_of(k), before)
