"""Rows with their channels in another order, in plain torch."""

from __future__ import annotations

from torch import Tensor


def permute_columns(x: Tensor, perm: Tensor, out: Tensor) -> None:
    """out[r, j] = x[r, perm[j]], 0 where there is no such channel; see `verify_kernels.gpu.linear_permute`."""
    known = (perm >= 0) & (perm < x.shape[1])
    gathered = x[:, perm.clamp(0, x.shape[1] - 1).long()]
    out.copy_(gathered.masked_fill(~known, 0.0))
