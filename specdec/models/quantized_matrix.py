"""A weight matrix as levels, zero points and scales."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, slots=True)
class QuantizedMatrix:
    """w[i, j] = (levels[i, j] - zeros[i, g]) * scales[i, g] with g = groups[j].

    levels: uint8 [out, in]. zeros: int16 [out, groups]. scales: floating-point [out, groups], as stored. groups: int64
    [in], the group of each input channel.
    """

    levels: Tensor
    zeros: Tensor
    scales: Tensor
    groups: Tensor

    def dequantised(self) -> Tensor:
        """The matrix, float32 [out, in]."""
        centred = self.levels.float() - self.zeros.float()[:, self.groups]
        return centred * self.scales.float()[:, self.groups]
