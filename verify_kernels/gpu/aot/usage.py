"""What one block of a compiled kernel takes of its chip."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Usage:
    """``registers`` per thread; ``spills``: bytes per thread on NVIDIA, registers on AMD; ``shared`` and ``scratch``
    (global) in bytes per block; ``tensor_memory`` in columns (Blackwell only)."""

    threads: int
    registers: int
    spills: int
    shared: int
    scratch: int
    tensor_memory: int
