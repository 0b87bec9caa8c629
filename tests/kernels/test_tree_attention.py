"""Tree attention: against the torch twin, and the promise that a node's bits do not depend on its batch."""

from __future__ import annotations

import copy
import dataclasses
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.batches import random_batch
from tests.kernels.natives import native_backend
from verify_kernels.backend import AttentionSpec, Backend, KvTensors
from verify_kernels.forward_batch import NEVER, BatchEntry, ForwardBatch
from verify_kernels.reference.backend import ReferenceBackend

PAGES, MAX_ROWS, POSITIONS = 24, 96, 1024
THP = Path("/sys/kernel/mm/transparent_hugepage/enabled")
DTYPES = (torch.float32, torch.bfloat16, torch.int8)


def random_kv(layers: int, pages: int, kv_heads: int, dim: int, dtype: torch.dtype, g: torch.Generator) -> KvTensors:
    """Keys and values as a cache of ``dtype`` may hold them; int8 scales spread over two decades."""
    kv = KvTensors.zeros(layers, pages, kv_heads, dim, dtype)
    for rows, scale in ((kv.k, kv.k_scale), (kv.v, kv.v_scale)):
        if scale is None:
            rows.copy_(torch.randn(rows.shape, generator=g))
        else:
            rows.copy_(torch.randint(-127, 128, rows.shape, generator=g))
            scale.copy_(10 ** (2 * torch.rand(scale.shape, generator=g) - 4))
    return kv


def copied(kv: KvTensors) -> KvTensors:
    return copy.deepcopy(kv)


def make_spec(
    heads: int, kv_heads: int, dim: int, window: int, qk_norm: bool, seed: int = 0, dtype: torch.dtype = torch.float32
) -> AttentionSpec:
    g = torch.Generator().manual_seed(seed)
    angles = torch.outer(torch.arange(POSITIONS), 10000.0 ** -(torch.arange(0, dim, 2) / dim))
    norm = torch.rand(dim, generator=g) + 0.5 if qk_norm else None
    return AttentionSpec(
        heads, kv_heads, dim, dim**-0.5, 1e-6, window, norm, norm, angles.cos(), angles.sin(),
        torch.randn(MAX_ROWS, (heads + 2 * kv_heads) * dim, generator=g),
        torch.zeros(MAX_ROWS, heads * dim),
        random_kv(1, PAGES, kv_heads, dim, dtype, g).layer(0),
    )  # fmt: skip


@pytest.mark.skipif(
    not THP.is_file() or "[never]" in THP.read_text(encoding="ascii"), reason="the system grants no huge pages"
)
def test_a_cache_may_lie_on_huge_pages() -> None:
    kv = KvTensors.zeros(2, 512, 2, 64, torch.bfloat16)  # 16 MiB of keys, of which whole huge pages fit anywhere
    address, eligible = kv.k.data_ptr(), ""
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            begin, end = (int(each, 16) for each in line.split()[0].split("-"))
        elif line.startswith("THPeligible") and begin <= address < end:
            eligible = line.split()[1]
    assert eligible == "1"


def run(backend: Backend, spec: AttentionSpec, batch: ForwardBatch) -> torch.Tensor:
    backend.reserve(MAX_ROWS, 64, spec.n_heads * spec.head_dim)
    fresh = dataclasses.replace(spec, out=torch.zeros_like(spec.out), kv=copied(spec.kv))
    backend.bind(fresh)(batch.rows, batch)
    return fresh.out[: batch.rows]


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim"),
    [(4, 2, 64), (9, 3, 64), (12, 2, 128), (4, 1, 256), (5, 1, 80), (7, 1, 64), (16, 2, 64)],
)
@pytest.mark.parametrize("window", [0, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_native_matches_reference(heads: int, kv_heads: int, dim: int, window: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(heads * dim + window)
    batch, _ = random_batch(rng, [(130, 0, 7), (0, 20, 3), (63, 2, 9), (200, 0, 0)], PAGES, 10)
    spec = make_spec(heads, kv_heads, dim, window, qk_norm=dim == 64, dtype=dtype)
    expected = run(ReferenceBackend(1), spec, batch)
    got = run(native_backend(), spec, batch)
    assert torch.allclose(got, expected, rtol=1e-4, atol=2e-6)


def replay_plainly(spec: AttentionSpec, entry: BatchEntry, qkv: torch.Tensor, node: int, threads: int) -> torch.Tensor:
    """Decode the path to ``node`` one row at a time on an otherwise empty batch; its output."""
    path = [node]
    while entry.parents[path[0]] >= 0:
        path.insert(0, entry.parents[path[0]])
    backend = native_backend(threads)
    backend.reserve(MAX_ROWS, 64, spec.n_heads * spec.head_dim)
    own = dataclasses.replace(spec, qkv=torch.zeros_like(spec.qkv), out=torch.zeros_like(spec.out), kv=copied(spec.kv))
    op = backend.bind(own)
    for depth, row in enumerate(path):
        own.qkv[0] = qkv[row]
        op(1, ForwardBatch.build([BatchEntry([0], [-1], entry.ctx + depth, entry.pages)]))
    return own.out[0].clone()


@settings(max_examples=60)
@given(
    seed=st.integers(0, 2**32 - 1),
    shapes=st.lists(
        st.tuples(st.integers(0, 200), st.integers(0, 12), st.integers(0, 15)), min_size=1, max_size=3
    ),
    geometry=st.sampled_from(
        [(4, 2, 16, 0), (6, 1, 64, 0), (3, 3, 80, 0), (4, 2, 16, 70), (4, 1, 32, 3), (7, 1, 16, 0)]
    ),
    threads=st.integers(1, 3),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_tree_nodes_equal_plain_decode_bitwise(
    seed: int,
    shapes: list[tuple[int, int, int]],
    geometry: tuple[int, int, int, int],
    threads: int,
    dtype: torch.dtype,
) -> None:
    rng = np.random.default_rng(seed)
    heads, kv_heads, dim, window = geometry
    batch, entries = random_batch(rng, shapes, PAGES, 10)
    spec = make_spec(heads, kv_heads, dim, window, qk_norm=bool(seed % 2), seed=seed % 1000, dtype=dtype)
    got = run(native_backend(threads), spec, batch)
    for index, entry in enumerate(entries):
        first = int(batch.entry_start[index])
        rows = len(entry.tokens)
        for node in {0, rows - 1, int(rng.integers(rows))}:
            plain = replay_plainly(spec, entry, spec.qkv[first : first + rows], node, 1 + seed % 2)
            assert torch.equal(got[first + node], plain), f"entry {index} node {node}"


def test_batch_metadata() -> None:
    # root 0 with children 1 and 3; 2 under 1; 4 under 3
    batch = ForwardBatch.build([BatchEntry([5, 6, 7, 8, 9], [-1, 0, 1, 0, 3], 10, [3])])
    assert batch.depth.tolist() == [0, 1, 2, 1, 2]
    assert batch.diverge.tolist() == [NEVER, NEVER, NEVER, 1, 1]


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        (BatchEntry([], [], 0, [0]), "entry"),
        (BatchEntry([1, 2], [-1, 1], 0, [0]), "parents"),
        (BatchEntry([1, 2], [-1, -1], 0, [0]), "parents"),
        (BatchEntry([1, 2], [-1, 0], 63, [0]), "pages"),
    ],
)
def test_bad_entries_are_rejected(entry: BatchEntry, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ForwardBatch.build([entry])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_slots_move_with_all_that_they_hold(dtype: torch.dtype) -> None:
    kv = random_kv(2, 6, 2, 16, dtype, torch.Generator().manual_seed(1))
    source = np.asarray([64 * 3 + 5, 64 * 3 + 9, 64 * 1 + 2], np.int64)
    target = np.asarray([64 * 3 + 3, 64 * 3 + 5, 64 * 3 + 9], np.int64)
    moved = copied(kv)
    moved.move(source, target)
    for got, before in zip(moved.lanes(), kv.lanes(), strict=True):
        expected = before.clone()
        for a, b in zip(source.tolist(), target.tolist(), strict=True):
            expected[:, b // 64, ..., b % 64] = before[:, a // 64, ..., a % 64]
        assert torch.equal(got, expected)
        assert not torch.equal(got, before)


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=str)
def test_written_rows_are_rounded_to_nearest_and_read_back_rounded(backend: str, dtype: torch.dtype) -> None:
    """The first row of a sequence sees its own key only, so the output is its value as stored in the cache."""
    spec = make_spec(2, 2, 64, 0, qk_norm=False, dtype=dtype)
    spec.qkv[0] = torch.randn(spec.qkv.shape[1], generator=torch.Generator().manual_seed(2)) * 3
    one = native_backend() if backend == "native" else ReferenceBackend(1)
    one.reserve(MAX_ROWS, 64, 128)
    one.bind(spec)(1, ForwardBatch.build([BatchEntry([0], [-1], 0, [4])]))
    value = spec.qkv[0, 256:].view(2, 64)
    if dtype == torch.bfloat16:
        expected = value.to(dtype).float()
    else:
        scale = value.abs().amax(-1, keepdim=True) / 127
        expected = torch.round(value / scale) * scale
    assert torch.allclose(spec.out[0].view(2, 64), expected, rtol=1e-6, atol=0)
    assert not torch.equal(expected, value)
