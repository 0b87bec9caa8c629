"""What a device offers a decoder: linear layers and attention, bound once, so that a step only runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.kv_tensors import KvTensors
from verify_kernels.packed_weights import Embedding, HostLinear, StackedLinear

Prologue = Literal["none", "rms", "silu", "gelu"]
Epilogue = Literal["store", "add", "norm_add"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """dst = epilogue(prologue(src) W^T + b), bound to its buffers.

    src: float32 [max_rows, k], or [max_rows, 2k] = [gate | up] for "silu" and "gelu".
    dst: float32 [max_rows, n]. "add" adds to it, "norm_add" adds the RMS-normed result, "store" overwrites.
    pre_norm: float32 [k] for "rms". post_norm: float32 [n] for "norm_add", which takes a weight of one part.
    """

    weight: HostLinear
    src: Tensor
    dst: Tensor
    prologue: Prologue = "none"
    epilogue: Epilogue = "store"
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    eps: float = 0.0


@dataclass(frozen=True, slots=True)
class GateSpec:
    """dst = act(gate) * up, src float32 [max_rows, 2n] = [gate | up], dst float32 [max_rows, n]; "silu" or "gelu"."""

    src: Tensor
    dst: Tensor
    activation: Prologue


@dataclass(frozen=True, slots=True)
class AddRowsSpec:
    """dst += src, or its RMS norm times ``post_norm`` float32 [n] where there is one; both float32 [max_rows, n]."""

    src: Tensor
    dst: Tensor
    post_norm: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True)
class AttentionSpec:
    """q/k norm, rotary embedding, KV write, then tree attention.

    qkv: float32 [max_rows, (n_heads + 2 n_kv_heads) head_dim], whole; out: float32 [max_rows, n_heads head_dim], which
    may be columns of a wider one.
    cos, sin: float32 [positions, head_dim / 2], half-split convention.
    kv: of one layer. Keys and values are rounded to its type as they are written, and read from it.
    window: a row at position p sees keys at positions > p - window; 0 sees all up to p.
    """

    n_heads: int
    n_kv_heads: int
    head_dim: int
    scale: float
    eps: float
    window: int
    q_norm: Tensor | None
    k_norm: Tensor | None
    cos: Tensor
    sin: Tensor
    qkv: Tensor
    out: Tensor
    kv: KvTensors


RowsOp = Callable[[int], None]
BatchOp = Callable[[ForwardBatch], None]


def bind_parts(linear: Callable[[LinearSpec], RowsOp], spec: LinearSpec, weight: StackedLinear) -> RowsOp:
    """A layer of several parts, each bound by ``linear`` to its columns of ``dst``."""
    ops, start = [], 0
    for part in weight.parts:
        ops.append(linear(replace(spec, weight=part, dst=spec.dst[:, start : start + part.n])))
        start += part.n

    def op(rows: int) -> None:
        for each in ops:
            each(rows)

    return op


class Backend(Protocol):
    """A set of kernels. ``name`` is what the server reports."""

    name: str
    threads: int

    def reserve(self, max_rows: int, max_width: int, max_heads_width: int) -> None:
        """Allocate scratch for ``max_rows`` rows of up to ``max_width`` channels, once, before binding."""

    def linear(self, spec: LinearSpec) -> RowsOp:
        """Bind a linear layer; the result runs it on the first n rows."""

    def attention(self, spec: AttentionSpec) -> BatchOp:
        """Bind a layer's attention; the result runs it on a batch."""

    def gate(self, spec: GateSpec) -> RowsOp:
        """Bind the gate in front of a product, on some of its channels; bit for bit what the prologue computes."""

    def add_rows(self, spec: AddRowsSpec) -> RowsOp:
        """Bind what is behind a product; bit for bit what the epilogue computes."""

    def embed(self, table: Embedding, tokens: NDArray[np.int32], scale: float, out: Tensor) -> None:
        """out[r] = table[tokens[r]] * scale; table float16 or float32 [vocab, hidden], or in blocks; out float32."""

    def gather_rows(self, x: Tensor, rows: NDArray[np.int32], out: Tensor) -> None:
        """out[i] = x[rows[i]]; float32."""

    def move_kv(self, kv: KvTensors, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy KV of global slots (page * 64 + lane) ``source`` to ``target`` in all layers, in order."""
