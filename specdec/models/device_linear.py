"""A linear layer on a GPU, with what stands in front of it: 16-bit, float8 or 4-bit weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

from torch import Tensor

from verify_kernels.backend import Prologue
from verify_kernels.gpu.act import Gate, act_mul
from verify_kernels.gpu.kernel_launch import FP8
from verify_kernels.gpu.linear import linear
from verify_kernels.gpu.linear_fp8 import linear_fp8
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_plan import LinearWorkspace
from verify_kernels.gpu.norm import add_norm
from verify_kernels.gpu.quantize import quantize_rows
from verify_kernels.gpu.quantized_weights import Int4Weight


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
        return self.inputs.view(FP8)[: rows * width].view(rows, width)


class DeviceLinear(ABC):
    """out = f(x) W^T + bias + residual for n outputs of k inputs; residual may be out itself. Rows and bias are in the
    model's type for rows. Nothing waits for the device."""

    def __init__(self, n: int, k: int, bias: Tensor | None, scratch: LayerScratch) -> None:
        self.n, self.k, self._bias, self._scratch = n, k, bias, scratch

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""

    def normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
        """Of rms(x) * norm; x [rows, k]."""
        inputs = self._scratch.rows(x.shape[0], self.k)
        add_norm(x, eps=eps, norm=norm, out=inputs)
        self.plain(inputs, out)

    def gated(self, gate_up: Tensor, gate: Gate, out: Tensor, residual: Tensor | None) -> None:
        """Of gate(g) * u; gate_up [rows, 2k] = [g | u]."""
        inputs = self._scratch.rows(gate_up.shape[0], self.k)
        act_mul(gate_up, inputs, gate)
        self.plain(inputs, out, residual)

    @abstractmethod
    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """Of x itself, [rows, k]."""


class DenseLinear(DeviceLinear):
    """weight: [n, k]; bias: [n] or None."""

    def __init__(self, weight: Tensor, bias: Tensor | None, scratch: LayerScratch) -> None:
        n, k = weight.shape
        super().__init__(n, k, bias, scratch)
        self.weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return self.weight.numel() * self.weight.element_size()

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = x W^T + bias + residual."""
        linear(x, self.weight, out, workspace=self._scratch.workspace, bias=self._bias, residual=residual)


class Fp8Linear(DeviceLinear):
    """weight: float8 e4m3 [n, k]; scale: float32 [n]; bias: [n] or None. A norm or gate is part of the quantisation."""

    def __init__(self, weight: Tensor, scale: Tensor, bias: Tensor | None, scratch: LayerScratch) -> None:
        n, k = weight.shape
        super().__init__(n, k, bias, scratch)
        self._weight, self._scale = weight, scale

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return self._weight.numel() + 4 * self._scale.numel()

    def normed(self, x: Tensor, norm: Tensor, eps: float, out: Tensor) -> None:
        """Of rms(x) * norm; x [rows, k]."""
        self._run(x, "rms", out, None, norm, eps)

    def gated(self, gate_up: Tensor, gate: Gate, out: Tensor, residual: Tensor | None) -> None:
        """Of gate(g) * u; gate_up [rows, 2k] = [g | u]."""
        self._run(gate_up, gate, out, residual)

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = x W^T + bias + residual."""
        self._run(x, "none", out, residual)

    def _run(
        self, x: Tensor, prologue: Prologue, out: Tensor, residual: Tensor | None,
        norm: Tensor | None = None, eps: float = 0.0,
    ) -> None:  # fmt: skip
        rows, scratch = x.shape[0], self._scratch
        q, scale = scratch.floats8(rows, self.k), scratch.scales[:rows]
        quantize_rows(x, q, scale, prologue=prologue, norm=norm, eps=eps)
        linear_fp8(
            q, scale, self._weight, self._scale, out, workspace=scratch.workspace, bias=self._bias, residual=residual
        )


class Int4Linear(DeviceLinear):
    """bias: [n] or None, of the rows' type."""

    def __init__(self, weight: Int4Weight, bias: Tensor | None, scratch: LayerScratch) -> None:
        super().__init__(weight.n, weight.k, bias, scratch)
        self._weight = weight

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass reads."""
        return self._weight.nbytes

    def plain(self, x: Tensor, out: Tensor, residual: Tensor | None = None) -> None:
        """out = x W^T + bias + residual."""
        linear_int4(x, self._weight, out, workspace=self._scratch.workspace, bias=self._bias, residual=residual)
