"""What a device offers a decoder. A decoder binds its layers once; a step then only runs what was bound."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.attention_spec import AttentionSpec
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.linear_spec import LinearSpec

RowsOp = Callable[[int], None]
BatchOp = Callable[[ForwardBatch], None]


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

    def embed(self, table: Tensor, tokens: NDArray[np.int32], scale: float, out: Tensor) -> None:
        """out[r] = table[tokens[r]] * scale; table float16 or float32 [vocab, hidden], out float32."""

    def gather_rows(self, x: Tensor, rows: NDArray[np.int32], out: Tensor) -> None:
        """out[i] = x[rows[i]]; float32."""

    def move_kv(self, k_pool: Tensor, v_pool: Tensor, source: NDArray[np.int64], target: NDArray[np.int64]) -> None:
        """Copy KV of global slots (page * 64 + lane) ``source`` to ``target`` in all layers, in order."""
