"""What a launcher checks of its tensors before it launches: shape, dtype, device, contiguity, alignment."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
INDEX = (torch.int32,)


def check_tensor(
    name: str, tensor: Tensor, shape: Sequence[int], dtypes: Iterable[torch.dtype], device: torch.device
) -> None:
    """Check one contiguous tensor.

    Floating-point tensors must start at a multiple of 16 bytes: triton picks another layout for others, and with it
    another order of additions.

    Raises:
        ValueError: one of them is not as asked; names the tensor and what it must be.
    """
    if tuple(tensor.shape) != tuple(shape):
        raise ValueError(f"{name}: has shape {tuple(tensor.shape)}; must be {tuple(shape)}")
    if tensor.dtype not in dtypes:
        raise ValueError(f"{name}: is {tensor.dtype}; must be one of {', '.join(map(str, dtypes))}")
    if tensor.device != device:
        raise ValueError(f"{name}: is on {tensor.device}; must be on {device}")
    if not tensor.is_contiguous():
        raise ValueError(f"{name}: has strides {tensor.stride()}; must be contiguous")
    if tensor.is_floating_point() and tensor.data_ptr() % 16:
        raise ValueError(f"{name}: must start at a multiple of 16 bytes; pass a tensor that is no odd slice")


def check_rank(name: str, tensor: Tensor, rank: int) -> None:
    """Check the number of dimensions, before shapes are read off it.

    Raises:
        ValueError: it is another one.
    """
    if tensor.dim() != rank:
        raise ValueError(f"{name}: has shape {tuple(tensor.shape)}; must have {rank} dimensions")
