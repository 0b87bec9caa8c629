"""Start-up self-test: do the kernels on this very machine give a row the same bits in any company?"""

from __future__ import annotations

from typing import Literal

import torch

from verify_kernels.attention_spec import AttentionSpec
from verify_kernels.backend import Backend
from verify_kernels.forward_batch import BatchEntry, ForwardBatch
from verify_kernels.hadamard import rotate
from verify_kernels.linear_spec import LinearSpec
from verify_kernels.packed_linear import WeightKind, pack_linear

NumericMode = Literal["bitwise", "numerical"]
ROWS = (2, 3, 5, 6, 7, 8, 13, 16, 40)


def self_test(backend: Backend, kind: WeightKind) -> NumericMode:
    """Run the kernels on random data in several companies; "bitwise" when no bit differs.

    Uses the scratch ``backend`` reserved, so run it on a backend of its own.
    """
    generator = torch.Generator().manual_seed(7)
    backend.reserve(max(ROWS), 640, 256)
    same = _linear_rows(backend, kind, generator) and _int8_exact(backend, generator)
    return "bitwise" if same and _tree_rows(backend, generator) else "numerical"


def _linear_rows(backend: Backend, kind: WeightKind, generator: torch.Generator) -> bool:
    n, k = 200, 576
    weight = pack_linear(torch.randn(n, k, generator=generator), None, kind)
    rows = torch.randn(max(ROWS), k, generator=generator)
    src, dst = rows.clone(), torch.zeros(max(ROWS), n)
    op = backend.linear(LinearSpec(weight, src, dst, "rms", "store", torch.ones(k), None, 1e-5))
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


def _int8_exact(backend: Backend, generator: torch.Generator) -> bool:
    """Extreme equal neighbours overflow kernels that add products in int16."""
    weight = torch.where(torch.rand(64, 512, generator=generator) < 0.5, -1.0, 1.0)
    weight[:, ::2] = weight[:, 1::2]
    src, dst = rotate(weight[:2]), torch.zeros(2, 64)  # rotated once more inside, these are the extremes again
    backend.linear(LinearSpec(pack_linear(rotate(weight), None, "int8"), src, dst))(2)
    return torch.allclose(dst.double(), weight[:2].double() @ weight.double().t(), atol=1e-2)


def _tree_rows(backend: Backend, generator: torch.Generator) -> bool:
    """A tree's nodes against their paths decoded one row at a time."""
    heads, kv_heads, dim, ctx = 4, 2, 64, 70
    angles = torch.outer(torch.arange(128), 1e4 ** -(torch.arange(0, dim, 2) / dim))
    rows = torch.randn(7, (heads + 2 * kv_heads) * dim, generator=generator)
    pools = torch.randn(2, 2, kv_heads, dim, 64, generator=generator)
    spec = AttentionSpec(
        heads, kv_heads, dim, dim**-0.5, 1e-6, 0, None, None, angles.cos(), angles.sin(),
        rows.clone(), torch.zeros(7, heads * dim), pools[0].clone(), pools[1].reshape(2, kv_heads, 64, dim).clone(),
    )  # fmt: skip
    attend = backend.attention(spec)
    parents = [-1, 0, 1, 1, 0, 4, 5]
    attend(ForwardBatch.build([BatchEntry([0] * 7, parents, ctx, [1, 0])]))
    expected = spec.out.clone()
    for node in range(7):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        for depth, row in enumerate(path):
            spec.qkv[0] = rows[row]
            attend(ForwardBatch.build([BatchEntry([0], [-1], ctx + depth, [1, 0])]))
        if not torch.equal(spec.out[0], expected[node]):
            return False
    return True
