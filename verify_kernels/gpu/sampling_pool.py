"""The lists and masks of a batch of rows, packed side by side: what rows of one sequence share is there once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from verify_kernels.row_sampling import RowSampling
from verify_kernels.sequence_edits import SequenceEdits

Words = NDArray[np.int32]
EDIT_BLOCK = 256  # list entries that the edit kernels take at once


class SamplingPool:
    """Where everything of ``rows`` will stand in the pool, before there is one.

    words: its length; saved: list entries of all rows. mask_begin, mask_words: int32 [rows], -1 and 0 where all is
    allowed. edits: int32 [rows, EDIT_WORDS], begin and length of the lists SEEN, PATH, BIAS, BANNED (ids, then counts
    or float32 biases), BIAS_STEP (biases that may be added at once), SAVED (list entries of the rows before).
    """

    SEEN: ClassVar[int] = 0
    PATH: ClassVar[int] = 2
    BIAS: ClassVar[int] = 4
    BANNED: ClassVar[int] = 6
    BIAS_STEP: ClassVar[int] = 8
    SAVED: ClassVar[int] = 9
    EDIT_WORDS: ClassVar[int] = 12

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self.words = self.saved = 0
        self.mask_begin = np.full(len(rows), -1, np.int32)
        self.mask_words = np.zeros(len(rows), np.int32)
        self.edits = np.zeros((len(rows), self.EDIT_WORDS), np.int32)
        self._parts: list[Words] = []
        self._shared: dict[tuple[str, int], tuple[int, int]] = {}
        for at, row in enumerate(rows):
            if row.edits is not None:
                self._add(at, row, row.edits)

    def write(self, pool: Words) -> None:
        """Put it all into ``pool``, int32 of at least ``words`` words."""
        if self._parts:
            np.concatenate(self._parts, out=pool[: self.words])

    def _add(self, at: int, row: RowSampling, edits: SequenceEdits) -> None:
        mask = edits.mask if row.mask is None else row.mask
        if mask is not None:
            self.mask_begin[at], self.mask_words[at] = self._share("mask", mask, mask)
        seen = path = (0, 0)
        if row.policy.penalises:
            seen = self._share("seen", edits, edits.seen_ids, edits.seen_counts)
            pairs = np.asarray(row.path, np.int32).reshape(-1, 2)
            path = self._put(pairs[:, 0], pairs[:, 1])
        bias = self._share("bias", edits, edits.bias_ids, edits.bias_values)
        banned = self._share("banned", edits, edits.banned) if row.ban else (0, 0)
        self.edits[at, :10] = (*seen, *path, *bias, *banned, _bias_step(edits.bias_ids), self.saved)
        self.saved += seen[1] + path[1] + bias[1] + banned[1]

    def _share(self, kind: str, owner: object, *columns: NDArray[np.generic]) -> tuple[int, int]:
        """Begin and length of what stands there once for all rows that have the same ``owner``."""
        key = (kind, id(owner))
        if key not in self._shared:
            self._shared[key] = self._put(*columns)
        return self._shared[key]

    def _put(self, *columns: NDArray[np.generic]) -> tuple[int, int]:
        begin = self.words
        for column in columns:
            self._parts.append(np.ascontiguousarray(column).view(np.int32))
            self.words += column.shape[0]
        return begin, columns[0].shape[0]


def _bias_step(ids: NDArray[np.int32]) -> int:
    return EDIT_BLOCK if len(set(ids.tolist())) == ids.size else 1
