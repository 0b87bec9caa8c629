"""A linear layer of 4-bit weights, as AWQ and GPTQ checkpoints hold them."""

from __future__ import annotations

from torch import Tensor

from specdec.models.device.device_linear import DeviceLinear
from specdec.models.device.layer_scratch import LayerScratch
from verify_kernels.gpu.linear_int4 import linear_int4
from verify_kernels.gpu.linear_int4_weight import Int4Weight


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
