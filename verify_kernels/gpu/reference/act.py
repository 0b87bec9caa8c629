"""Gated activations in plain torch."""

from __future__ import annotations

from typing import Literal

from torch import Tensor
from torch.nn.functional import gelu, silu


def act_mul(gate_up: Tensor, out: Tensor, kind: Literal["silu", "gelu"]) -> None:
    """out = silu(gate) * up, or gelu_tanh(gate) * up; see `verify_kernels.gpu.act`."""
    gate, up = gate_up.float().chunk(2, dim=-1)
    out.copy_((silu(gate) if kind == "silu" else gelu(gate, approximate="tanh")) * up)
