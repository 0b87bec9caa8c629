"""One decoder layer's weights on a GPU."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from specdec.models.device.device_linear import DeviceLinear


@dataclass(frozen=True, slots=True)
class DeviceLayer:
    """As `specdec.models.weights.LayerWeights`; norms are in the rows' type."""

    attn_norm: Tensor
    qkv: DeviceLinear
    q_norm: Tensor | None
    k_norm: Tensor | None
    o: DeviceLinear
    attn_post_norm: Tensor | None
    mlp_norm: Tensor
    gate_up: DeviceLinear
    down: DeviceLinear
    mlp_post_norm: Tensor | None

    @property
    def nbytes(self) -> int:
        """Bytes of its matrices."""
        return sum(linear.nbytes for linear in (self.qkv, self.o, self.gate_up, self.down))
