"""What every launcher shares: checks of its tensors, and the description of a case to be compiled ahead of time."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

ROW_TYPES = (torch.float32, torch.float16, torch.bfloat16)
HALF_TYPES = (torch.float16, torch.bfloat16)
FP8 = torch.float8_e4m3fn
FP8_LARGEST = 448.0
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


@dataclass(frozen=True, slots=True)
class CompileCase:
    """``signature``: triton types by argument name ("*bf16", "*i32", "i32", "fp32"), constexpr arguments left out.

    ``constexprs``: value by constexpr argument name. ``divisible``: arguments that are multiples of 16 (pointers of
    torch tensors are, most strides too), which lets triton emit wide loads. ``options``: num_warps, num_stages and
    other compile options. ``targets``: substrings of the targets it is meant for; empty: all.
    ``resident``: blocks of threads that are meant to share a multiprocessor.
    """

    name: str
    kernel: Any  # triton's JITFunction, which has no public type
    signature: Mapping[str, str]
    constexprs: Mapping[str, Any]
    divisible: tuple[str, ...] = ()
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    resident: int = 1
