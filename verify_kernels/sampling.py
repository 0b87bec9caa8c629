"""What a device offers the sampler, and what it is told of each row: policy, edits of logits, place in the noise."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.fields import MIN_TEMPERATURE

_RECORD = struct.Struct("<Qdfffffi")


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How a sequence's tokens are chosen. ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1, ``min_p`` 0 are off.

    seed: unsigned 64-bit key of the sequence's noise. Penalties 1, 0, 0 are off.
    record: the leading 40 bytes of ``sd_sample_row`` in ``cpu/csrc/sampling_view.h``, packed once.

    Raises:
        ValueError: a number lies outside its range.
    """

    seed: int
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    record: bytes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _need("seed", 0 <= self.seed < 1 << 64, "must be an unsigned 64-bit integer")
        in_range = self.temperature == 0 or MIN_TEMPERATURE <= self.temperature <= 1 / MIN_TEMPERATURE
        _need("temperature", in_range, f"must be 0 or within [{MIN_TEMPERATURE}, {1 / MIN_TEMPERATURE:g}]")
        _need("top_k", 0 <= self.top_k < 1 << 31, "must be a non-negative 32-bit integer")
        _need("top_p", 0 <= self.top_p <= 1, "must be within [0, 1]")
        _need("min_p", 0 <= self.min_p <= 1, "must be within [0, 1]")
        repetition = 0 < self.repetition_penalty < math.inf
        _need("repetition_penalty", repetition, "must be positive and finite")
        _need("presence_penalty", math.isfinite(self.presence_penalty), "must be finite")
        _need("frequency_penalty", math.isfinite(self.frequency_penalty), "must be finite")
        packed = _RECORD.pack(
            self.seed, self.top_p, self.temperature, self.log_min_p, self.repetition_penalty,
            self.presence_penalty, self.frequency_penalty, self.top_k,
        )  # fmt: skip
        object.__setattr__(self, "record", packed)

    @property
    def log_min_p(self) -> float:
        """log(min_p); -inf when off."""
        return math.log(self.min_p) if self.min_p > 0 else -math.inf

    @property
    def penalises(self) -> bool:
        """Whether earlier tokens change the logits."""
        return self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0


def _need(name: str, ok: bool, rule: str) -> None:
    if not ok:
        raise ValueError(f"{name}: {rule}")


_EDITS_RECORD = struct.Struct("<9q")


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
        """The trailing 72 bytes of ``sd_sample_row`` in ``cpu/csrc/sampling_view.h``; kept until the arrays grow.

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
        return _EDITS_RECORD.pack(
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


class RowSampling(NamedTuple):
    """A named tuple, because one is made per tree node and step.

    position: absolute position the new token will occupy; together with the policy's seed it keys the noise.
    edits: None when nothing changes the logits. path: (token, output count, ...) of the tokens between the sequence's
    base state and this node, counts including the base; overrides the base's counts. ban: mask ``edits.banned``.
    mask: the node's own in place of ``edits.mask``, of the same form; needs ``edits``.
    """

    policy: SamplingPolicy
    position: int
    edits: SequenceEdits | None = None
    path: tuple[int, ...] = ()
    ban: bool = False
    mask: NDArray[np.uint32] | None = None


NO_TOKEN = -1
MAX_LOGPROBS = 20
MAX_WIDTH = 64


def check_width(name: str, width: int) -> None:
    """ValueError unless so many tokens of a row can be asked for; ``name``: the argument's."""
    if not 0 <= width <= MAX_WIDTH:
        raise ValueError(f"{name}: must be within 0 to {MAX_WIDTH}, got {width}")


class SamplingKernels(Protocol):
    """Row by row, each row's result a function of that row alone: bitwise the same in any batch, for any threads.

    ``logits`` is float32 [rows, vocab], unit stride in a row. A logit is *live* when > -1e30; others, NaN among them,
    are as good as masked, and live ones above 1e30 count as 1e30. A row without a live logit yields NO_TOKEN.
    """

    name: str

    def greedy(self, logits: Tensor, threads: int) -> NDArray[np.int32]:
        """The lowest id of the largest logit per row, nothing else applied; int32 [rows]."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling], threads: int) -> NDArray[np.int32]:
        """The token each row takes; int32 [rows]."""

    def children(
        self, logits: Tensor, rows: Sequence[RowSampling], width: int, threads: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The best ``width`` tokens per row by z + noise under the row's filters (by logit when greedy), best first.

        Returns ids int32 [rows, width], padded with NO_TOKEN, and their log-probabilities float64 [rows, width] in
        the processed and filtered distribution (greedy: softmax of the processed logits).
        """

    def logprobs(
        self, logits: Tensor, tokens: NDArray[np.int32], top: int, threads: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
        """log softmax of the logits as they are: of ``tokens`` int32 [rows], and the best ``top`` <= 20 per row.

        Returns chosen float64 [rows], ids int32 [rows, top] padded with NO_TOKEN, values float64 [rows, top], by
        falling probability, lower id first among equals.
        """
