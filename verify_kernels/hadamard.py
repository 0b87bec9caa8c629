"""A fixed rotation of a layer's inputs that spreads outliers before int8 rounding.

x W^T = (x R)(W R)^T for any orthogonal R. A few input channels of a transformer are a hundred times larger than the
others, and one scale per 256 channels then rounds the others away; after a Hadamard rotation all are of one size (the
idea of QuaRot, arXiv 2404.00456, here per block of 256 so that it costs eight additions a channel). The rotation is
row-local and its own inverse.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor

BLOCK = 256


def blocks(width: int) -> list[tuple[int, int]]:
    """(start, size) of the rotated blocks: runs of 256, the rest cut into falling powers of two."""
    cut, start = [], 0
    while start < width:
        size = min(BLOCK, 1 << ((width - start).bit_length() - 1))
        cut.append((start, size))
        start += size
    return cut


def rotate(x: Tensor) -> Tensor:
    """``x`` [..., width] float32, every block of its last dimension times the Hadamard matrix over sqrt(size)."""
    parts = []
    whole = x.shape[-1] // BLOCK * BLOCK
    if whole:
        # H256 = H16 (x) H16: two small products instead of one of 256 x 256.
        small = _matrix(16)
        square = x[..., :whole].reshape(-1, 16, 16)
        parts.append((small @ square @ small).reshape(*x.shape[:-1], whole))
    for start, size in blocks(x.shape[-1] - whole):
        parts.append(x[..., whole + start : whole + start + size] @ _matrix(size))
    return torch.cat(parts, dim=-1)


@functools.cache
def _matrix(size: int) -> Tensor:
    """The symmetric Sylvester-Hadamard matrix of ``size``, orthonormal."""
    matrix = torch.ones(1, 1)
    while matrix.shape[0] < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix / math.sqrt(size)
