"""How each row of a batch is to be sampled, as device arrays that one upload fills, and the sampler's scratch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.sampling import RowSampling, SequenceEdits


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What is False costs nothing. A superset of what the rows ask for gives the same tokens, so that a graph captured
    for some needs serves all batches within them.

    noise: a row has a temperature. filters: of those one has top-k, top-p or min-p. edits: a row has penalties, bias
    or bans. masks: a row has allowed tokens.
    """

    noise: bool = False
    filters: bool = False
    edits: bool = False
    masks: bool = False

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


INERT = -1.0  # the temperature of a row that pads the batch
_RECORD = np.dtype(
    [
        ("seed", "<i8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("log_min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
    ]
)  # fmt: skip; what SamplingPolicy.record holds
_WIDE = {
    "seed": torch.int64, "position": torch.int64, "top_p": torch.float64, "inverse": torch.float64,
    "inverse_repetition": torch.float64,
}  # fmt: skip
_NARROW = {
    "temperature": torch.float32, "log_min_p": torch.float32, "repetition": torch.float32, "presence": torch.float32,
    "frequency": torch.float32, "top_k": torch.int32, "mask_begin": torch.int32, "mask_words": torch.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Struct of arrays over ``rows`` rows, all views of one buffer, so that addresses never change.

    seed, position: int64 (unsigned 64 bits); top_p: float64; temperature (0 greedy, below 0: an inert row that yields
    no token), log_min_p, repetition, presence, frequency: float32; inverse (1 / temperature, 1 when greedy),
    inverse_repetition: float64, of the float32 values; top_k: int32; each [rows]. mask_begin, mask_words: int32
    [rows], where in ``pool`` the row's allowed tokens stand, -1: all are allowed. edits: int32 [rows, 12], the
    row's lists in ``pool``, and where in ``saved``, float32, the logits that they change are kept meanwhile. pool:
    int32 [words]. `SamplingPool` says how both are laid out.

    ``position`` may be overwritten on the device before the kernels run.
    """

    rows: int
    seed: Tensor
    position: Tensor
    top_p: Tensor
    inverse: Tensor
    inverse_repetition: Tensor
    temperature: Tensor
    log_min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    mask_begin: Tensor
    mask_words: Tensor
    edits: Tensor
    pool: Tensor
    saved: Tensor
    device_buffer: Tensor
    host_buffer: Tensor

    @staticmethod
    def allocate(rows: int, pool_words: int, saved: int, device: torch.device) -> SamplingTable:
        """Room for ``rows`` rows whose lists and masks take ``pool_words`` and whose lists have ``saved`` entries.

        Raises:
            ValueError: rows < 1.
        """
        if rows < 1:
            raise ValueError(f"rows: {rows}; must be at least 1")
        words = _words(rows) + max(pool_words, 1)
        buffer = torch.zeros(words, dtype=torch.int32, device=device)
        host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        return SamplingTable(
            rows,
            **_views(buffer, rows),
            saved=torch.zeros(max(saved, 1), dtype=torch.float32, device=device),
            device_buffer=buffer,
            host_buffer=host,
        )

    @staticmethod
    def words(rows: int) -> int:
        """int32 words of a table's columns, without the pool."""
        return _words(rows)

    @staticmethod
    def within(rows: int, device_buffer: Tensor, host_buffer: Tensor, saved: Tensor) -> SamplingTable:
        """A table in memory of others: int32, one length, from a multiple of 16 bytes on; the pool is what is left of
        it. saved: float32, on the device."""
        return SamplingTable(
            rows, **_views(device_buffer, rows), saved=saved, device_buffer=device_buffer, host_buffer=host_buffer
        )

    @staticmethod
    def of(rows: Sequence[RowSampling], device: torch.device) -> SamplingTable:
        """A table just large enough for ``rows``, and filled with them."""
        pool = SamplingPool(rows)
        table = SamplingTable.allocate(len(rows), pool.words, pool.saved, device)
        table._upload(rows, pool)
        return table

    def fill(self, rows: Sequence[RowSampling]) -> SamplingNeeds:
        """Replace the contents by ``rows``, with inert rows behind them; what they need of the kernels.

        One copy, which does not wait: the one before it must have arrived (a step's results tell).

        Raises:
            ValueError: more rows, list entries or masks than there is room for; says which.
        """
        if len(rows) > self.rows:
            raise ValueError(f"rows: {len(rows)}; the table has room for {self.rows}")
        pool = SamplingPool(rows)
        if pool.words > self.pool.shape[0]:
            raise ValueError(f"rows: lists and masks take {pool.words} words; the table has {self.pool.shape[0]}")
        if pool.saved > self.saved.shape[0]:
            raise ValueError(f"rows: lists have {pool.saved} entries; the table has room for {self.saved.shape[0]}")
        self._upload(rows, pool)
        return SamplingNeeds.of(rows)

    def _upload(self, rows: Sequence[RowSampling], pool: SamplingPool) -> None:
        used = self.write(rows, pool)
        self.device_buffer[:used].copy_(self.host_buffer[:used], non_blocking=True)

    def write(self, rows: Sequence[RowSampling], pool: SamplingPool) -> int:
        """Replace the contents of the host's buffer by ``rows``, whose pool fits, with inert rows behind them; how many
        of its words are to be sent."""
        n = len(rows)
        host = {name: view.numpy() for name, view in _views(self.host_buffer, self.rows).items()}
        records = np.frombuffer(b"".join(row.policy.record for row in rows), _RECORD)
        for name in _RECORD.names or ():
            host[name][:n] = records[name]
        host["position"][:n] = np.asarray([row.position for row in rows], np.uint64).view(np.int64)
        heat = records["temperature"].astype(np.float64)
        host["inverse"][:n] = 1 / np.where(heat > 0, heat, 1)
        host["inverse_repetition"][:n] = 1 / records["repetition"].astype(np.float64)
        host["temperature"][n:] = INERT
        host["mask_begin"][:n], host["mask_words"][:n] = pool.mask_begin, pool.mask_words
        host["edits"][:n], host["edits"][n:] = pool.edits, 0
        pool.write(host["pool"])
        return _words(self.rows) + pool.words


def _room(rows: int) -> int:
    """Words of a narrow field: all fields start at a multiple of 16 bytes."""
    return -(-rows // 4) * 4


def _words(rows: int) -> int:
    return _room(rows) * (2 * len(_WIDE) + len(_NARROW)) + rows * SamplingPool.EDIT_WORDS


def _views(buffer: Tensor, rows: int) -> dict[str, Tensor]:
    views, at = {}, 0
    for names, size in ((_WIDE, 2), (_NARROW, 1)):
        for name, dtype in names.items():
            views[name] = buffer[at : at + rows * size].view(dtype)
            at += _room(rows) * size
    pool_begin = _words(rows)
    views["edits"] = buffer[at:pool_begin].view(rows, SamplingPool.EDIT_WORDS)
    views["pool"] = buffer[pool_begin:]
    return views


_TILE = 1024  # listed tokens looked at together
_SHORT_TILE = 256


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A row is ``splits`` x ``groups`` x ``group`` tokens, the last split padded; one program scans a split.

    ``segments``: ``splits``, padded to a power of two. Results do not depend on a plan.
    """

    SIZES: ClassVar[tuple[tuple[int, int, int], ...]] = ((64, 4, 16), (64, 64, 16), (64, 64, 64))

    vocab: int
    groups: int
    group: int
    segments: int

    @staticmethod
    def of(vocab: int) -> SamplingPlan:
        """The plan for a vocabulary: the first of SIZES (groups, group, segments) that holds it.

        Raises:
            ValueError: ``vocab`` is not within 1 to 2^18 (more and a row's weight could pass 2^63).
        """
        most = max(groups * group * segments for groups, group, segments in SamplingPlan.SIZES)
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
        """Entries of each split's list that are looked at together; ``short``: of lists of a token or two."""
        return (_SHORT_TILE if short else _TILE) // self.segments


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """For up to ``rows`` rows of ``plan.vocab`` logits.

    places, spare: int16 [rows, splits, tokens of a split], room for lists of tokens, which are short and so are what
    is written; counts: int32 [rows, splits]; weights: int64 [rows, splits]; maxima: float32 [rows, splits * groups];
    peak, bound: float32 [rows].
    """

    rows: int
    plan: SamplingPlan
    places: Tensor
    spare: Tensor
    counts: Tensor
    weights: Tensor
    maxima: Tensor
    peak: Tensor
    bound: Tensor

    @staticmethod
    def bytes_needed(rows: int, plan: SamplingPlan) -> int:
        """Of such a workspace."""
        per_split = 2 * 2 * plan.tokens + 4 + 8 + 4 * plan.groups
        return rows * (plan.splits * per_split + 8)

    @staticmethod
    def allocate(rows: int, plan: SamplingPlan, device: torch.device) -> SamplingWorkspace:
        """Four bytes per row and token, most of them never touched.

        Raises:
            ValueError: rows < 1.
        """
        if rows < 1:
            raise ValueError(f"rows: {rows}; must be at least 1")
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
