"""A linear layer of float8 weights, whose rows become float8 in front of it."""

from __future__ import annotations

from torch import Tensor

from specdec.models.device.device_linear import DeviceLinear, Gate
from specdec.models.device.layer_scratch import LayerScratch
from verify_kernels.gpu.linear_fp8 import linear_fp8
from verify_kernels.gpu.quantize import Prologue, quantize_rows


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
