"""What the linear launchers check alike."""

from __future__ import annotations

import torch
from torch import Tensor

from verify_kernels.gpu.argument_checks import ROW_TYPES, check_rank, check_tensor
from verify_kernels.gpu.linear_tiles import MODES, LinearMode


def check_result(
    out: Tensor,
    rows: int,
    n: int,
    device: torch.device,
    *,
    inputs: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    mode: LinearMode,
) -> None:
    """Check where a linear layer's result goes and what is added to it.

    Raises:
        ValueError: a shape, dtype, device or layout is wrong, or ``out`` overwrites ``x``; names the argument.
    """
    if mode not in MODES:
        raise ValueError(f"mode: {mode!r} is not known; must be one of {', '.join(MODES)}")
    check_rank("out", out, 2)
    check_tensor("out", out, (rows, n), ROW_TYPES, device)
    if out.numel() and out.data_ptr() == inputs.data_ptr():
        raise ValueError("out: is x; programs would read what others have overwritten, pass another tensor")
    if bias is not None:
        check_tensor("bias", bias, (n,), ROW_TYPES, device)
    if residual is not None:
        check_tensor("residual", residual, (rows, n), ROW_TYPES, device)
