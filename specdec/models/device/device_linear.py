"""A linear layer on a GPU, with what stands in front of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

from torch import Tensor

from specdec.models.device.layer_scratch import LayerScratch
from verify_kernels.gpu.act import act_mul
from verify_kernels.gpu.norm import add_norm

Gate = Literal["silu", "gelu"]


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
