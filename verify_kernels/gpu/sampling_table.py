"""How each row of a batch is sampled, as device arrays that one upload fills, and the sampler's scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.sampling import RowSampling, SequenceEdits


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """Which kernels a batch of rows needs.

    A superset of the needs gives the same tokens, so a graph captured for some needs serves all batches within them.
    """

    noise: bool = False  # a row has a temperature
    filters: bool = False  # a row with a temperature has top-k, top-p or min-p
    edits: bool = False  # a row has penalties, bias or bans
    masks: bool = False  # a row has allowed tokens

    @staticmethod
    def of(rows: Iterable[RowSampling]) -> SamplingNeeds:
        """The least that serves ``rows``."""
        noise = filters = edits = masks = False
        for policy, _, changes, _, ban, mask in rows:
            if policy.temperature > 0:
                noise = True
                filters = filters or policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0
            if changes is not None:
                masks = masks or mask is not None or changes.mask is not None
                edits = edits or policy.penalises or changes.bias_ids.size > 0 or (ban and changes.banned.size > 0)
        return SamplingNeeds(noise, filters, edits, masks)


Words = NDArray[np.int32]
EDIT_BLOCK = 256  # list entries that the edit kernels take at once


class SamplingPool:
    """The layout of the masks and lists of ``rows`` in a table's pool.

    The constants are places in a row of ``edits``. A list has two words there, its begin and length in the pool; ids
    come first, then counts or float32 biases.
    """

    SEEN: ClassVar[int] = 0  # list of the sequence's tokens
    PATH: ClassVar[int] = 2  # list of the tree path's tokens
    BIAS: ClassVar[int] = 4  # list of biased tokens
    BANNED: ClassVar[int] = 6  # list of banned tokens
    SAVED: ClassVar[int] = 8  # list entries of the rows before
    EDIT_WORDS: ClassVar[int] = 12  # words in a row of ``edits``, a multiple of 16 bytes

    def __init__(self, rows: Sequence[RowSampling]) -> None:
        self.words = 0  # of the pool
        self.saved = 0  # list entries of all rows
        self.masks = np.zeros((2, len(rows)), np.int32)  # where a row's mask begins and its words; see `SamplingTable`
        self.masks[0] = -1
        self.edits = np.zeros((len(rows), self.EDIT_WORDS), np.int32)
        self._parts: list[Words] = []
        self._shared: dict[tuple[str, int], tuple[int, int]] = {}
        for at, row in enumerate(rows):
            if row.edits is not None:
                self._add(at, row, row.edits)

    def write(self, pool: Words) -> None:
        """Write masks and lists into ``pool``, int32 of at least ``words`` words."""
        if self._parts:
            np.concatenate(self._parts, out=pool[: self.words])

    def _add(self, at: int, row: RowSampling, edits: SequenceEdits) -> None:
        mask = edits.mask if row.mask is None else row.mask
        if mask is not None:
            self.masks[:, at] = self._share("mask", mask, mask)
        seen = path = (0, 0)
        if row.policy.penalises:
            seen = self._share("seen", edits, edits.seen_ids, edits.seen_counts)
            pairs = np.asarray(row.path, np.int32).reshape(-1, 2)
            path = self._put(pairs[:, 0], pairs[:, 1])
        bias = self._share("bias", edits, edits.bias_ids, edits.bias_values)
        banned = self._share("banned", edits, edits.banned) if row.ban else (0, 0)
        self.edits[at, :9] = (*seen, *path, *bias, *banned, self.saved)
        self.saved += seen[1] + path[1] + bias[1] + banned[1]

    def _share(self, kind: str, owner: object, *columns: NDArray[np.generic]) -> tuple[int, int]:
        """Begin and length of columns that all rows with the same ``owner`` share."""
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


INERT = -1.0  # the temperature of a row that pads the batch
# The columns in memory's order. Both begin with the fields of `SamplingPolicy.record`, in its order.
_WIDE = {
    "seed": torch.int64, "top_p": torch.float64, "position": torch.int64, "inverse": torch.float64,
    "inverse_repetition": torch.float64,
}  # fmt: skip
_NARROW = {
    "temperature": torch.float32, "log_min_p": torch.float32, "repetition": torch.float32, "presence": torch.float32,
    "frequency": torch.float32, "top_k": torch.int32, "mask_begin": torch.int32, "mask_words": torch.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Struct of arrays over ``rows`` rows, all views of one buffer, so that addresses never change.

    Columns are [rows]; `_WIDE` and `_NARROW` have their types.
    """

    rows: int
    seed: Tensor  # unsigned 64 bits
    position: Tensor  # unsigned 64 bits; may be overwritten on the device before the kernels run
    top_p: Tensor
    inverse: Tensor  # 1 / temperature of the float32 value; 1 if greedy
    inverse_repetition: Tensor  # 1 / repetition of the float32 value
    temperature: Tensor  # 0: greedy; below 0: an inert row, which yields no token
    log_min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    mask_begin: Tensor  # where the row's mask begins in ``pool``; -1: all tokens are allowed
    mask_words: Tensor
    edits: Tensor  # int32 [rows, EDIT_WORDS], the row's lists in ``pool``; see `SamplingPool`
    pool: Tensor  # int32 [words], masks and lists
    saved: Tensor  # float32, the logits that lists change, until they are restored
    host: tuple[NDArray[Any], ...]  # the wide columns, the narrow ones, edits and pool in the host's buffer

    @staticmethod
    def words(rows: int) -> int:
        """int32 words of a table's columns, without the pool."""
        return _room(rows) * (2 * len(_WIDE) + len(_NARROW)) + rows * SamplingPool.EDIT_WORDS

    @staticmethod
    def within(rows: int, device_buffer: Tensor, host_buffer: Tensor, saved: Tensor) -> SamplingTable:
        """A table in given memory: int32 buffers of one length, aligned to 16 bytes, whose rest becomes the pool."""
        wide, narrow, edits, pool = _blocks(device_buffer, rows)
        columns = {name: wide[i, :rows].view(dtype) for i, (name, dtype) in enumerate(_WIDE.items())}
        columns |= {name: narrow[i, :rows].view(dtype) for i, (name, dtype) in enumerate(_NARROW.items())}
        host = tuple(block.numpy() for block in _blocks(host_buffer, rows))
        return SamplingTable(rows, **columns, edits=edits, pool=pool, saved=saved, host=host)

    @staticmethod
    def of(rows: Sequence[RowSampling], device: torch.device) -> SamplingTable:
        """A table that holds exactly ``rows``."""
        pool = SamplingPool(rows)
        words = SamplingTable.words(len(rows)) + max(pool.words, 1)
        there = torch.zeros(words, dtype=torch.int32, device=device)
        here = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        saved = torch.zeros(max(pool.saved, 1), dtype=torch.float32, device=device)
        table = SamplingTable.within(len(rows), there, here, saved)
        used = table.write(rows, pool)
        there[:used].copy_(here[:used], non_blocking=True)
        return table

    def write(self, rows: Sequence[RowSampling], pool: SamplingPool) -> int:
        """Replace the host buffer's contents by ``rows``, followed by inert rows, and return the words in use.

        ``pool`` is that of ``rows``; both must fit. Copying the words to the device is the caller's.
        """
        n, (wide, narrow, edits, words) = len(rows), self.host
        wide_floats, narrow_floats = wide.view(np.float64), narrow.view(np.float32)
        records = np.frombuffer(b"".join([row.policy.record for row in rows]), np.int64).reshape(n, 5)
        wide[:2, :n] = records[:, :2].T  # seed, top_p
        narrow[:6, :n] = records.view(np.int32)[:, 4:].T  # temperature to top_k
        wide[2, :n] = np.array([row.position for row in rows], np.uint64).view(np.int64)  # position
        heat = narrow_floats[0, :n].astype(np.float64)
        wide_floats[3, :n] = 1 / np.where(heat > 0, heat, 1)  # inverse
        wide_floats[4, :n] = 1 / narrow_floats[2, :n].astype(np.float64)  # inverse_repetition
        narrow_floats[0, n:] = INERT
        narrow[6:, :n] = pool.masks
        edits[:n], edits[n:] = pool.edits, 0
        pool.write(words)
        return SamplingTable.words(self.rows) + pool.words


def _room(rows: int) -> int:
    """Words of a narrow field: all fields start at a multiple of 16 bytes."""
    return -(-rows // 4) * 4


def _blocks(buffer: Tensor, rows: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The wide columns, the narrow ones, edits and pool in a table's buffer."""
    room, pool = _room(rows), SamplingTable.words(rows)
    wide, edits = room * 2 * len(_WIDE), room * (2 * len(_WIDE) + len(_NARROW))
    return (
        buffer[:wide].view(torch.int64).view(len(_WIDE), room),
        buffer[wide:edits].view(len(_NARROW), room),
        buffer[edits:pool].view(rows, SamplingPool.EDIT_WORDS),
        buffer[pool:],
    )


_TILE = 2048  # listed tokens of a row that a program reads together
_SHORT_TILE = 256  # the same, of lists of a token or two


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A row is ``splits`` x ``groups`` x ``group`` tokens, the last split padded; one program scans a split.

    Results do not depend on the plan.
    """

    SIZES: ClassVar[tuple[tuple[int, int, int], ...]] = ((64, 4, 32), (64, 64, 32), (64, 64, 64), (64, 64, 128))

    vocab: int
    groups: int  # in a split
    group: int  # tokens in a group
    segments: int  # ``splits``, padded to a power of two

    @staticmethod
    def of(vocab: int) -> SamplingPlan:
        """The plan for a vocabulary: the first of SIZES (groups, group, segments) that holds it.

        Raises:
            ValueError: ``vocab`` is not within 1 to 2^19 - 1 (more and a row's weight, 2^44 a token, could pass 2^63).
        """
        most = max(groups * group * segments for groups, group, segments in SamplingPlan.SIZES) - 1
        if not 1 <= vocab <= most:
            raise ValueError(f"logits: {vocab} columns; must be within 1 to {most}")
        size = next(size for size in SamplingPlan.SIZES if size[0] * size[1] * size[2] >= vocab)
        return SamplingPlan(vocab, *size)

    @property
    def tokens(self) -> int:
        """Tokens of a split."""
        return self.groups * self.group

    @property
    def splits(self) -> int:
        """Programs that scan a row."""
        return -(-self.vocab // self.tokens)

    def columns(self, short: bool) -> int:
        """Entries of each split's list that a program reads together; ``short``: of lists of a token or two."""
        return (_SHORT_TILE if short else _TILE) // self.segments


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """Scratch of the sampler for up to ``rows`` rows of ``plan.vocab`` logits."""

    rows: int
    plan: SamplingPlan
    places: Tensor  # int16 [rows, splits, tokens of a split], lists of tokens
    spare: Tensor  # like places
    counts: Tensor  # int32 [rows, splits], lengths of the lists
    weights: Tensor  # int64 [rows, splits]
    maxima: Tensor  # float32 [rows, splits * groups]
    peak: Tensor  # float32 [rows]
    bound: Tensor  # float32 [rows]

    @staticmethod
    def bytes_needed(rows: int, plan: SamplingPlan) -> int:
        """Bytes of a workspace."""
        per_split = 2 * 2 * plan.tokens + 4 + 8 + 4 * plan.groups
        return rows * (plan.splits * per_split + 8)

    @staticmethod
    def allocate(rows: int, plan: SamplingPlan, device: torch.device) -> SamplingWorkspace:
        """A workspace of four bytes per row and token, most of them never touched."""
        splits = plan.splits
        return SamplingWorkspace(
            rows,
            plan,
            places=torch.zeros((rows, splits, plan.tokens), dtype=torch.int16, device=device),
            spare=torch.zeros((rows, splits, plan.tokens), dtype=torch.int16, device=device),
            counts=torch.zeros((rows, splits), dtype=torch.int32, device=device),
            weights=torch.zeros((rows, splits), dtype=torch.int64, device=device),
            maxima=torch.zeros((rows, splits * plan.groups), dtype=torch.float32, device=device),
            peak=torch.zeros(rows, dtype=torch.float32, device=device),
            bound=torch.zeros(rows, dtype=torch.float32, device=device),
        )
