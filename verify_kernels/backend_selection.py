"""Chooses this machine's kernels, native or plain torch, and tests at start-up that they are batch-invariant."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, cast

import numpy as np
import torch

from specdec.errors import KernelError
from verify_kernels.backend import AttentionSpec, Backend, KvTensors, LinearSpec
from verify_kernels.cpu.library import load_library
from verify_kernels.cpu.native_backend import NativeBackend, NativeSampling, native_round_blocks
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.packed_weights import (
    BlockKind,
    PackedLinear,
    RoundBlocks,
    RoundedKind,
    pack_block_linear,
    pack_linear,
    round_blocks,
)
from verify_kernels.quant_formats import FORMATS, sample_blocks
from verify_kernels.reference.backend import ReferenceBackend
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import SamplingKernels

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Kernels:
    """One device's kernels."""

    name: str
    backend: Callable[[], Backend]  # a new one, with its own scratch, for each decoder
    sampling: SamplingKernels
    round_blocks: RoundBlocks  # of a draft model's weights


def load_kernels(choice: Literal["auto", "native", "reference"], cache_dir: Path, threads: int) -> Kernels:
    """The kernels ``choice``; "auto" is native, or with a warning reference if native ones cannot be built.

    Raises:
        KernelError: ``choice`` is "native", which cannot be built or loaded.
    """
    if choice != "reference":
        try:
            library = load_library(cache_dir)
            return Kernels(
                "native",
                lambda: NativeBackend(library, threads),
                NativeSampling(library, threads),
                partial(native_round_blocks, library),
            )
        except KernelError as error:
            if choice == "native":
                raise KernelError(f"{error} (or set engine.kernels to `reference`)") from None
            logger.warning("native kernels are not available, falling back to slow reference ones: %s", error)
    return Kernels("reference", lambda: ReferenceBackend(threads), ReferenceSampling(), round_blocks)


NumericMode = Literal["bitwise", "numerical"]
ROWS = (2, 3, 5, 6, 7, 8, 13, 16, 40)  # batch sizes of the self-test


def self_test(
    backend: Backend, kind: RoundedKind | Literal["auto"], kv_dtype: torch.dtype = torch.float32
) -> NumericMode:
    """Run the kernels on random data in batches of several sizes; "bitwise" if no bit differs.

    Reserves ``backend``'s scratch, so run it on a backend of its own. kv_dtype: the KV cache's.
    """
    generator = torch.Generator().manual_seed(7)
    backend.reserve(max(ROWS), 640, 256)
    n, k = 200, 576
    packed = [pack_linear(torch.randn(n, k, generator=generator), None, "int8" if kind == "auto" else kind)]
    if kind == "auto":
        packed += [_block_weight(name) for name in FORMATS]
    same = all(_linear_rows(backend, weight, generator) for weight in packed)
    return "bitwise" if same and _tree_rows(backend, generator, kv_dtype) else "numerical"


def _block_weight(kind: str) -> PackedLinear:
    k = 512 if FORMATS[kind].block == 256 else 544
    raw = sample_blocks(kind, 200, k, np.random.default_rng(7))
    return pack_block_linear(torch.from_numpy(raw), None, cast(BlockKind, kind), k)


def _linear_rows(backend: Backend, weight: PackedLinear, generator: torch.Generator) -> bool:
    n, k = weight.n, weight.k
    rows = torch.randn(max(ROWS), k, generator=generator)
    src, dst = rows.clone(), torch.zeros(max(ROWS), n)
    op = backend.bind(LinearSpec(weight, src, dst, "rms", "store", torch.ones(k), None, 1e-5))
    alone = []
    for row in rows:
        src[0] = row
        op(1)
        alone.append(dst[0].clone())
    src.copy_(rows)
    for count in ROWS:
        op(count)
        if not all(torch.equal(dst[i], alone[i]) for i in range(count)):
            return False
    return True


def _tree_rows(backend: Backend, generator: torch.Generator, dtype: torch.dtype) -> bool:
    """A tree's nodes against their paths decoded one row at a time."""
    heads, kv_heads, dim, ctx = 4, 2, 64, 70
    angles = torch.outer(torch.arange(128), 1e4 ** -(torch.arange(0, dim, 2) / dim))
    rows = torch.randn(7, (heads + 2 * kv_heads) * dim, generator=generator)
    kv = KvTensors.zeros(1, 2, kv_heads, dim, dtype).layer(0)
    spec = AttentionSpec(
        heads, kv_heads, dim, dim**-0.5, 1e-6, 0, None, None, angles.cos(), angles.sin(),
        torch.randn(max(ROWS), rows.shape[1], generator=generator), torch.zeros(max(ROWS), heads * dim), kv,
    )  # fmt: skip
    bound = backend.bind(spec)

    def attend(entry: BatchEntry) -> None:
        bound(len(entry.tokens), ForwardBatch.build([entry]))

    for start in (0, 35):  # the context's own keys
        attend(BatchEntry([0] * 35, list(range(-1, 34)), start, [1, 0]))
    spec.qkv[:7] = rows
    parents = [-1, 0, 1, 1, 0, 4, 5]
    attend(BatchEntry([0] * 7, parents, ctx, [1, 0]))
    expected = spec.out[:7].clone()
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for depth, row in enumerate(path):
            spec.qkv[0] = rows[row]
            attend(BatchEntry([0], [-1], ctx + depth, [1, 0]))
        if not torch.equal(spec.out[0], expected[node]):
            return False
    return True
