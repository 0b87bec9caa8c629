"""Tables of the rotary embedding."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from specdec.models.config import RopeConfig


def rope_tables(rope: RopeConfig, head_dim: int, positions: int, *, local: bool) -> tuple[Tensor, Tensor]:
    """cos and sin, float32 [positions, head_dim / 2], computed in float64.

    ``local`` picks the base of sliding-window layers where the family has its own; scaling applies to the
    global base only (as Gemma 3 does). "llama3" scaling is the piecewise rule of Llama 3.1's release:
    wavelengths beyond the original context divided by ``factor`` are slowed by ``factor``, short ones kept,
    those between interpolated.
    """
    theta = rope.local_theta if local and rope.local_theta is not None else rope.theta
    inverse = theta ** -(torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
    if rope.scaling is not None and not (local and rope.local_theta is not None):
        inverse = _scaled(inverse, rope.scaling)
    angles = torch.outer(torch.arange(positions, dtype=torch.float64), inverse)
    return angles.cos().float().contiguous(), angles.sin().float().contiguous()


def _scaled(inverse: Tensor, scaling: tuple[str | float, ...]) -> Tensor:
    kind, *numbers = scaling
    values = [float(x) for x in numbers]
    if kind == "linear":
        return inverse / values[0]
    if kind == "factors":
        return inverse / torch.tensor(values, dtype=torch.float64)
    if kind == "llama3":
        factor, low, high, original = values
        wavelength = 2 * math.pi / inverse
        smooth = ((original / wavelength - low) / (high - low)).clamp(0, 1)
        return inverse * ((1 - smooth) / factor + smooth)
    raise ValueError(f"rope scaling {kind!r} is not known")
