"""Weights in blocks on their way from a file to the kernels, and rows of an embedding."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch

from tests.kernels.natives import CACHE, native_backend, need_compiler
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import native_round_blocks
from verify_kernels.packed_weights import (
    FITS,
    DraftKind,
    embedding_rows,
    pack_block_linear,
    round_blocks,
    unpack_linear,
)
from verify_kernels.quant_formats import FORMATS, sample_blocks
from verify_kernels.reference.backend import ReferenceBackend


def raw_rows(kind: str, n: int, k: int) -> torch.Tensor:
    return torch.from_numpy(sample_blocks(kind, n, k, np.random.default_rng(n + k)))


@pytest.mark.parametrize("kind", FITS)
def test_native_rounding_equals_the_twins_except_for_the_order_of_sums(kind: DraftKind) -> None:
    need_compiler()
    native = partial(native_round_blocks, load_library(CACHE))
    weight = torch.randn(64, 896, generator=torch.Generator().manual_seed(5)) * 0.02
    weight[3, 32:64] = 0.0
    weight[4] *= 1e-5  # scales below the smallest normal half
    ours, theirs = (round_to(weight, kind).view(-1, FORMATS[kind].block_bytes) for round_to in (native, round_blocks))
    different = (ours != theirs).any(dim=1)
    assert different.float().mean() < 0.01
    stand_for = [unpack_linear(pack_block_linear(raw.view(64, -1), None, kind, 896)) for raw in (ours, theirs)]
    assert (stand_for[0] - stand_for[1]).norm() < 0.01 * weight.norm()


@pytest.mark.parametrize("kind", FORMATS)
def test_embeddings_are_read_from_blocks(kind: str) -> None:
    k = 768 if FORMATS[kind].block == 256 else 544
    table = pack_block_linear(raw_rows(kind, 70, k), None, kind, k)  # type: ignore[arg-type]
    ids = np.array([69, 0, 31, 32, 15, 16, 0], np.int32)
    expected = unpack_linear(table)[ids] * 1.5
    assert torch.equal(embedding_rows(table, torch.from_numpy(ids).long()) * 1.5, expected)
    for backend in (native_backend(), ReferenceBackend(1)):
        out = torch.full((9, k), 7.0)
        backend.embed(table, ids, 1.5, out)
        assert torch.equal(out[:7], expected)
        assert bool((out[7:] == 7.0).all())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_embeddings_of_a_plain_table_are_scaled_in_float32(dtype: torch.dtype) -> None:
    table = torch.randn(40, 100, generator=torch.Generator().manual_seed(3)).to(dtype)
    table[39, :3] = torch.tensor([-0.0, 6e-8, -6.1e-5], dtype=dtype)  # halves below the smallest normal one
    ids = np.array([39, 0, 7, 0], np.int32)
    expected = table[ids].float() * torch.tensor(40**0.5)
    for backend in (native_backend(), ReferenceBackend(1)):
        out = torch.full((6, 100), 7.0)
        backend.embed(table, ids, 40**0.5, out)
        assert torch.equal(out[:4].view(torch.int32), expected.view(torch.int32))
        assert bool((out[4:] == 7.0).all())
