"""Chosen rows in plain torch."""

from __future__ import annotations

from torch import Tensor


def gather_rows(x: Tensor, rows: Tensor, out: Tensor) -> None:
    """out[i] = x[rows[i]], zeros where there is no such row; see `verify_kernels.gpu.gather_rows`."""
    out.copy_(rows_or_zeros(x, rows))


def rows_or_zeros(table: Tensor, index: Tensor) -> Tensor:
    """float32 table[index], zeros where the index is out of range."""
    known = (index >= 0) & (index < table.shape[0])
    rows = table[index.clamp(0, table.shape[0] - 1).long()].float()
    return rows.where(known[:, None], 0.0)
