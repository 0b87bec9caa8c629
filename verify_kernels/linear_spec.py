"""One linear layer of a decoder, with what is fused in front of it and behind it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from verify_kernels.packed_linear import PackedLinear

Prologue = Literal["none", "rms", "silu", "gelu"]
Epilogue = Literal["store", "add", "norm_add"]


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """dst = epilogue(prologue(src) W^T + b), bound to its buffers.

    src: float32 [max_rows, k], or [max_rows, 2k] = [gate | up] for "silu" and "gelu".
    dst: float32 [max_rows, n]. "add" adds to it, "norm_add" adds the RMS-normed result, "store" overwrites.
    pre_norm: float32 [k] for "rms". post_norm: float32 [n] for "norm_add".
    """

    weight: PackedLinear
    src: Tensor
    dst: Tensor
    prologue: Prologue = "none"
    epilogue: Epilogue = "store"
    pre_norm: Tensor | None = None
    post_norm: Tensor | None = None
    eps: float = 0.0
