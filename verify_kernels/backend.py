"""A CPU decoder's kernels as a protocol: linear layers and attention, bound once, so that a step only runs them."""

from __future__ import annotations

import math
import mmap
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.forward_batch import PAGE_SIZE, ForwardBatch
from verify_kernels.packed_weights import Embedding, HostLinear, PackedLinear


@dataclass(frozen=True, slots=True)
class KvTensors:
    """Keys and values of a paged cache on the CPU: of one layer, or of all with one more dimension in front.

    float32, bfloat16 or int8. int8 keys, and queries for them, are rotated by `verify_kernels.packed_weights.rotate`.
    """

    k: Tensor  # [pages, kv_heads, head_dim, 64]: transposed, so that one load serves 16 keys
    v: Tensor  # [pages, kv_heads, 64, head_dim]
    k_scale: Tensor | None = None  # float32 [pages, kv_heads, 64], factors of int8 keys
    v_scale: Tensor | None = None  # float32 [pages, kv_heads, 64], factors of int8 values

    @staticmethod
    def zeros(layers: int, pages: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> KvTensors:
        """Zero-filled, for all layers; memory is taken as it is first written."""
        shape = (layers, pages, kv_heads)
        k, v = _zeros(dtype, *shape, head_dim, PAGE_SIZE), _zeros(dtype, *shape, PAGE_SIZE, head_dim)
        if dtype != torch.int8:
            return KvTensors(k, v)
        return KvTensors(k, v, *(_zeros(torch.float32, *shape, PAGE_SIZE) for _ in range(2)))

    def layer(self, index: int) -> KvTensors:
        """The cache of layer ``index``."""
        return KvTensors(*(None if each is None else each[index] for each in self._fields()))  # type: ignore[arg-type]

    def lanes(self) -> Iterator[Tensor]:
        """Every tensor as [..., pages, kv_heads, values, 64]; the last index is a token's place in its page."""
        yield self.k
        yield self.v.transpose(-1, -2)
        for scale in (self.k_scale, self.v_scale):
            if scale is not None:
                yield scale.unsqueeze(-2)

    def move(self, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy what global slots (page * 64 + lane) ``source`` hold to ``target`` in all layers; all are read first."""
        (from_page, from_lane), (to_page, to_lane) = np.divmod(source, PAGE_SIZE), np.divmod(target, PAGE_SIZE)
        for lanes in self.lanes():
            # By numpy, as torch takes several times as long for a few slots. It has no bfloat16, but bits are enough.
            array = (lanes.view(torch.int16) if lanes.dtype == torch.bfloat16 else lanes).numpy()
            array[:, to_page, ..., to_lane] = array[:, from_page, ..., from_lane]

    def page_bytes(self) -> list[NDArray[np.uint8]]:
        """The memory of every tensor of all layers as [layers, pages, bytes]."""
        return [each.flatten(2).view(torch.uint8).numpy() for each in self._fields() if each is not None]

    def _fields(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        return self.k, self.v, self.k_scale, self.v_scale


def _zeros(dtype: torch.dtype, *shape: int) -> Tensor:
    return torch.frombuffer(allocate(math.prod(shape) * dtype.itemsize), dtype=dtype).view(*shape)


def allocate(nbytes: int) -> mmap.mmap:
    """Zero-filled memory, on huge pages where the system grants them. It is taken as it is first written."""
    # private, because the default (shared) anonymous memory is not eligible for transparent huge pages
    memory = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


Prologue = Literal["none", "rms", "silu", "gelu"]
Epilogue = Literal["store", "add", "norm_add"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """dst = epilogue(prologue(src) W^T + b), bound to its buffers.

    "add" adds to dst, "norm_add" adds the RMS-normed result, "store" overwrites.
    """

    weight: HostLinear  # of one part for "norm_add"
    src: Tensor  # float32 [max_rows, k], or [max_rows, 2k] = [gate | up] for "silu" and "gelu"
    dst: Tensor  # float32 [max_rows, n]
    prologue: Prologue = "none"
    epilogue: Epilogue = "store"
    pre_norm: Tensor | None = None  # float32 [k], for "rms"
    post_norm: Tensor | None = None  # float32 [n], for "norm_add"
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class ExpertsSpec:
    """x += the sum over each row's chosen experts of share * down(gate(up(norm(x)))), bound to its buffers.

    A row chooses the experts of its highest scores, and adds their outputs in that order. Shares are those of the
    softmax over all scores, or over the chosen ones.
    """

    experts: int
    chosen: int  # by each row
    normalise: bool  # whether a row's shares add up to 1
    gate_up: PackedLinear  # [experts * 2k, hidden]: rows [gate; up] of each expert, in whole tiles
    down: PackedLinear  # [experts * hidden, k]: likewise
    activation: Literal["silu", "gelu"]
    norm: Tensor  # float32 [hidden]
    eps: float
    scores: Tensor  # float32 [max_rows, experts], contiguous
    x: Tensor  # float32 [max_rows, hidden]
    gated: Tensor  # float32 [max_rows * chosen, 2k], scratch
    out: Tensor  # float32 [max_rows * chosen, hidden], scratch


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """q/k norm, rotary embedding, KV write, then tree attention."""

    n_heads: int  # a multiple of n_kv_heads
    n_kv_heads: int
    head_dim: int  # even, at most 256
    scale: float  # of the scores
    eps: float  # of the norms
    window: int  # a row at position p sees keys at positions > p - window; 0: all up to p
    q_norm: Tensor | None  # float32 [head_dim]
    k_norm: Tensor | None  # float32 [head_dim]
    cos: Tensor  # float32 [positions, head_dim / 2], half-split convention
    sin: Tensor  # like cos
    qkv: Tensor  # float32 [max_rows, (n_heads + 2 n_kv_heads) head_dim], contiguous
    out: Tensor  # float32 [max_rows, n_heads head_dim], contiguous
    kv: KvTensors  # of one layer; keys and values are rounded to its type when written


LayerSpec = LinearSpec | ExpertsSpec | AttentionSpec


class BoundLayers(Protocol):
    """Layers that run one after the other, on the first rows of their buffers."""

    def __call__(self, rows: int, batch: ForwardBatch | None = None) -> None:
        """batch: of these rows; None only without attention."""


def linear_parts(spec: LinearSpec) -> list[tuple[LinearSpec, PackedLinear]]:
    """``spec`` by part of its weight, each with its columns of ``dst``, and that part."""
    if isinstance(spec.weight, PackedLinear):
        return [(spec, spec.weight)]
    parts, start = [], 0
    for part in spec.weight.parts:
        parts.append((replace(spec, weight=part, dst=spec.dst[:, start : start + part.n]), part))
        start += part.n
    return parts


class Backend(Protocol):
    """A set of CPU kernels."""

    def reserve(self, max_rows: int, max_width: int, max_heads_width: int) -> None:
        """Allocate scratch for ``max_rows`` rows of up to ``max_width`` channels, once, before binding.

        A row counts once for each of its experts.
        """

    def bind(self, *layers: LayerSpec) -> BoundLayers:
        """Bind ``layers``; the result runs them in order.

        Raises:
            ValueError: a buffer does not fit.
        """

    def embed(self, table: Embedding, tokens: NDArray[np.int32], scale: float, out: Tensor) -> None:
        """out[r] = table[tokens[r]] * scale; table float16 or float32 [vocab, hidden], or in blocks; out float32."""
