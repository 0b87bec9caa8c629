"""Memory that the ranks of one model share on a machine, and their barrier in it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Mapping

import torch
from torch import Tensor

_HEAD = 4096  # bytes before the buffers: where ranks meet (csrc/ranks.cpp)


class RankLostError(RuntimeError):
    """Another rank of the model is gone."""

    def __init__(self, why: str = "") -> None:
        super().__init__(f"a rank of the target was lost{': ' + why if why else ''}")


def create_segment(nbytes: int) -> int:
    """A file descriptor of new memory without a name, which is freed when the last process that holds it ends.

    Pages are taken as they are written.
    """
    segment = os.memfd_create("specdec-ranks", os.MFD_CLOEXEC)
    os.ftruncate(segment, nbytes)
    return segment


def segment_bytes(shapes: Mapping[str, tuple[int, int]]) -> int:
    """Bytes of a segment with float32 buffers of these shapes."""
    return _HEAD + sum(_padded(shape) for shape in shapes.values())


def _padded(shape: tuple[int, int]) -> int:
    return -(-shape[0] * shape[1] * 4 // _HEAD) * _HEAD


class SharedRanks:
    """Rank ``rank`` of ``size`` over a segment of `create_segment` with float32 buffers of ``shapes``.

    Each rank writes its own columns and calls `meet`; then all see all columns. spin_us: see `spin_for`.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        segment: int,
        shapes: Mapping[str, tuple[int, int]],
        rank: int,
        size: int,
        spin_us: int,
    ) -> None:
        self.rank, self.size = rank, size
        memory = mmap.mmap(segment, segment_bytes(shapes))
        flat = torch.frombuffer(memory, dtype=torch.float32)  # keeps the memory mapped
        self._buffers: dict[str, Tensor] = {}
        start = _HEAD
        for name, shape in shapes.items():
            first = start // 4
            self._buffers[name] = flat[first : first + shape[0] * shape[1]].view(shape)
            start += _padded(shape)
        self._head = ctypes.c_void_p(flat.data_ptr())
        self._flat, self._spin_us = flat, spin_us
        self._meet, self._break = library.sd_ranks_meet, library.sd_ranks_break

    def buffer(self, name: str) -> Tensor:
        """The buffer ``name``, shared by all ranks."""
        return self._buffers[name]

    def meet(self) -> None:
        """Wait for all ranks; what any of them wrote before is visible to all after.

        Raises:
            RankLostError: one is gone.
        """
        if self._meet(self._head, self.size, self._spin_us):
            raise RankLostError

    def break_up(self) -> None:
        """Make every rank's `meet` raise, now and later: a rank is gone."""
        self._break(self._head)


_SPIN_US = 60  # longer than a layer's ranks drift apart


def spin_for(ranks: int, threads: int, cores: int) -> int:
    """Microseconds that a rank spins for the others before it sleeps.

    0 with more threads than cores: a spinning rank would keep the one it waits for from running.
    """
    return _SPIN_US if ranks * threads <= cores else 0
