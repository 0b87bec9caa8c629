"""Tensors of the device, and pinned host memory that they are copied to."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor


class HostMirror:
    """``copy`` may be part of a graph; what it brought may be read once the work queued with it is done."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._there = list(tensors)
        self._here = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]

    def copy(self) -> None:
        """Queue the copies."""
        for here, there in zip(self._here, self._there, strict=True):
            here.copy_(there, non_blocking=True)

    @property
    def arrays(self) -> list[NDArray[Any]]:
        """What was copied last, in the tensors' order; overwritten by the next copy."""
        return [tensor.numpy() for tensor in self._here]
