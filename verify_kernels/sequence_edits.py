"""What one sequence changes in its logits before sampling: penalties, bias, allowed and banned tokens."""

from __future__ import annotations

import struct
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

_RECORD = struct.Struct("<9q")


class SequenceEdits:
    """Base state of a sequence, shared by all its tree nodes; nodes add the tokens of their path on top.

    seen_ids, seen_counts: int32, the distinct tokens penalties look at and how often each was *output* (0: only in
    the prompt). bias_ids int32, bias_values float32. mask: uint32 words, bit v & 31 of word v >> 5 set: v is allowed
    (None: all are; tokens beyond the last word are not). banned: int32, tokens masked while a row asks for it.
    """

    def __init__(
        self,
        bias_ids: NDArray[np.int32],
        bias_values: NDArray[np.float32],
        mask: NDArray[np.uint32] | None,
        banned: NDArray[np.int32],
        seen: Iterable[int],
    ) -> None:
        self.bias_ids, self.bias_values, self.mask, self.banned = bias_ids, bias_values, mask, banned
        self._index = {token: i for i, token in enumerate(dict.fromkeys(seen))}
        self._n_seen = len(self._index)
        self._ids = np.fromiter(self._index, np.int32, self._n_seen)
        self._counts = np.zeros(self._n_seen, np.int32)
        self._records: dict[bool, bytes] = {}

    @property
    def seen_ids(self) -> NDArray[np.int32]:
        """Distinct tokens seen so far, in order of appearance."""
        return self._ids[: self._n_seen]

    @property
    def seen_counts(self) -> NDArray[np.int32]:
        """How often each of ``seen_ids`` was output."""
        return self._counts[: self._n_seen]

    def add_output(self, tokens: Iterable[int]) -> None:
        """Count committed output tokens. Rows made before see the new counts: make rows anew after a commit."""
        for token in tokens:
            at = self._index.setdefault(token, self._n_seen)
            if at == self._n_seen:
                self._grow(token)
            self._counts[at] += 1

    def path_counts(self, path: Iterable[int]) -> tuple[int, ...]:
        """(token, count, token, count, ...): for each distinct token of ``path``, its count with the path added."""
        totals: dict[int, int] = {}
        for token in path:
            if token not in totals:
                at = self._index.get(token)
                totals[token] = 0 if at is None else int(self._counts[at])
            totals[token] += 1
        return tuple(number for pair in totals.items() for number in pair)

    def record(self, ban: bool, mask: NDArray[np.uint32] | None = None) -> bytes:
        """The trailing 72 bytes of ``sd_sample_row`` in ``cpu/csrc/sampling.h``; kept until the arrays grow.

        mask: a row's own, which replaces ``self.mask``; its record is not kept, as the mask lives with the row.
        """
        if mask is not None:
            return self._packed(ban, mask)
        record = self._records.get(ban)
        if record is None:
            record = self._records[ban] = self._packed(ban, self.mask)
        return record

    def _packed(self, ban: bool, mask: NDArray[np.uint32] | None) -> bytes:
        address, words = (0, 0) if mask is None else (mask.ctypes.data, mask.shape[0])
        return _RECORD.pack(
            self._ids.ctypes.data, self._counts.ctypes.data, self._n_seen,
            self.bias_ids.ctypes.data, self.bias_values.ctypes.data, _lengths(self.bias_ids.shape[0], words),
            address, self.banned.ctypes.data, self.banned.shape[0] if ban else 0,
        )  # fmt: skip

    def _grow(self, token: int) -> None:
        if self._n_seen == self._ids.shape[0]:
            room = max(64, 2 * self._n_seen)
            self._ids, self._counts = _resized(self._ids, room), _resized(self._counts, room)
        self._ids[self._n_seen], self._counts[self._n_seen] = token, 0
        self._n_seen += 1
        self._records.clear()


def _lengths(n_bias: int, mask_words: int) -> int:
    return n_bias | mask_words << 32


def _resized(array: NDArray[np.int32], room: int) -> NDArray[np.int32]:
    larger = np.zeros(room, np.int32)
    larger[: array.shape[0]] = array
    return larger
