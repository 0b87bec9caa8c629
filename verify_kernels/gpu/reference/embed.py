"""Token embeddings in plain torch."""

from __future__ import annotations

from torch import Tensor

from verify_kernels.gpu.reference.gather_rows import rows_or_zeros


def embed(table: Tensor, tokens: Tensor, scale: float, out: Tensor) -> None:
    """out[r] = table[tokens[r]] * scale; see `verify_kernels.gpu.embed`."""
    out.copy_(rows_or_zeros(table, tokens) * scale)
