"""A model's weights on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.models.device.dense_linear import DenseLinear
from specdec.models.device.device_layer import DeviceLayer


@dataclass(frozen=True, slots=True)
class DeviceWeights:
    """``embed`` [vocab, hidden] and the output matrix, which is the same memory where the model ties them, are in the
    rows' type whatever the layers' matrices are in. Logits are float32."""

    embed: Tensor
    layers: list[DeviceLayer]
    final_norm: Tensor
    lm_head: DenseLinear

    @property
    def nbytes(self) -> int:
        """Bytes of weights one pass over a row reads."""
        return self.lm_head.nbytes + sum(layer.nbytes for layer in self.layers)
