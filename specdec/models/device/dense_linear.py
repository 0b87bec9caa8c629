"""A linear layer whose weights are of its rows' own type."""

from __future__ import annotations

from torch import Tensor

from specdec.models.device.device_linear import DeviceLinear
from specdec.models.device.layer_scratch import LayerScratch
from verify_kernels.gpu.linear import linear


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
