"""How much of a linear layer's result one program computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LinearTile:
    """``block_m`` rows by ``block_n`` output channels, on ``num_warps`` warps, loads ``num_stages`` deep.

    The weight is the first operand of the product and the rows are the second, so the tensor core's wide side lies
    along the output channels. With block_n a multiple of 64 and num_warps of 4, every tile compiles to the same kind
    of instruction on Hopper (wgmma m64), for 1 row as for 2048.
    """

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
