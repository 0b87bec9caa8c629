"""Scratch that all linear layers of a model share, one after the other."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.gpu.linear_workspace import LinearWorkspace


@dataclass(frozen=True, slots=True)
class LayerScratch:
    """``inputs``: what a layer's rows become before the product, flat, in the rows' type or float8; ``scales``: float32
    [max_rows], of float8 rows."""

    inputs: Tensor
    scales: Tensor
    workspace: LinearWorkspace

    def rows(self, rows: int, width: int) -> Tensor:
        """[rows, width] of ``inputs``."""
        return self.inputs[: rows * width].view(rows, width)

    def floats8(self, rows: int, width: int) -> Tensor:
        """float8 [rows, width] in the memory of ``inputs``."""
        return self.inputs.view(torch.float8_e4m3fn)[: rows * width].view(rows, width)
