"""Keys and values of a paged cache on the CPU, as every backend lays them out."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class KvTensors:
    """One layer's cache, or that of all layers with one more dimension in front.

    k: [pages, kv_heads, head_dim, 64] (transposed: one load serves 16 keys); v: [pages, kv_heads, 64, head_dim]; both
    float32, bfloat16 or int8. k_scale, v_scale: float32 [pages, kv_heads, 64], of int8 alone: what a head and token is
    to be multiplied by. int8 keys are rotated by `verify_kernels.packed_weights.rotate`, and queries with them.
    """

    k: Tensor
    v: Tensor
    k_scale: Tensor | None = None
    v_scale: Tensor | None = None

    @staticmethod
    def zeros(layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvTensors:
        """Zero-filled, for all layers; memory is taken as it is first written."""
        shape = (layers, pages, kv_heads)
        k, v = _zeros(dtype, *shape, head_dim, PAGE_SIZE), _zeros(dtype, *shape, PAGE_SIZE, head_dim)
        if dtype != torch.int8:
            return KvTensors(k, v)
        return KvTensors(k, v, *(_zeros(torch.float32, *shape, PAGE_SIZE) for _ in range(2)))

    @staticmethod
    def token_bytes(layers: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
        """Bytes that keys and values of one token take."""
        scale = torch.float32.itemsize if dtype == torch.int8 else 0
        return 2 * layers * kv_heads * (head_dim * dtype.itemsize + scale)

    def layer(self, index: int) -> KvTensors:
        """One layer of all."""
        return KvTensors(*(None if each is None else each[index] for each in self._fields()))  # type: ignore[arg-type]

    def lanes(self) -> Iterator[Tensor]:
        """Every tensor as [..., pages, kv_heads, values, 64], whose last index is a token's place in its page."""
        yield self.k
        yield self.v.transpose(-1, -2)
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                yield scale.unsqueeze(-2)

    def _fields(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.k, self.v, self.k_scale, self.v_scale


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    """On huge pages where the system grants them."""
    memory = mmap.mmap(-1, math.prod(shape) * dtype.itemsize)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=dtype).view(*shape)
