"""Where one array lies in a packed-weights buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

DTYPES = {
    "uint8": torch.uint8,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """An array of ``shape`` and ``dtype`` (a key of `DTYPES`) that starts ``offset`` bytes into the buffer."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes of the array, without the padding after it."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize
