"""Where one tensor of a GGUF file lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

from gguf import GGMLQuantizationType


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """``shape`` is outermost first; ``offset`` counts from the start of the file; rows are the last dimension."""

    name: str
    shape: tuple[int, ...]
    type: GGMLQuantizationType
    offset: int
    row_bytes: int

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return math.prod(self.shape[:-1]) * self.row_bytes
