"""The sampler's kernels as a protocol, and how each row is sampled: policy, edits of logits, place in the noise."""

from __future__ import annotations

import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

_RECORD = struct.Struct("<Qdfffffi")  # the first fields of ``sd_sample_row`` in cpu/csrc/sampling_view.h


@dataclass(frozen=True, slots=True)
class SamplingPolicy:
    """How a sequence's tokens are chosen. `specdec.core.types.SamplingParams` checks the ranges of the numbers."""

    seed: int  # unsigned 64-bit key of the sequence's noise
    temperature: float = 1.0  # 0: greedy
    top_k: int = 0  # 0: off
    top_p: float = 1.0  # 1: off
    min_p: float = 0.0  # 0: off
    repetition_penalty: float = 1.0  # 1: off
    presence_penalty: float = 0.0  # 0: off
    frequency_penalty: float = 0.0  # 0: off
    record: bytes = field(init=False, repr=False, compare=False)  # the first 40 bytes of ``sd_sample_row``

    def __post_init__(self) -> None:
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


_EDITS_RECORD = struct.Struct("<9q")  # the last fields of ``sd_sample_row``


class SequenceEdits:
    """A sequence's edits of logits, shared by all its tree nodes; a node adds the tokens of its path.

    bias_ids: int32, each once; bias_values: float32. mask: uint32 words, in which bit v & 31 of word v >> 5 allows
    token v, and tokens beyond the last word are not allowed; None allows all. banned: int32, tokens masked for rows
    with ``ban``. seen: tokens of the prompt, to which penalties apply.
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
        """Distinct tokens to which penalties apply, in order of appearance; int32."""
        return self._ids[: self._n_seen]

    @property
    def seen_counts(self) -> NDArray[np.int32]:
        """How often each of ``seen_ids`` was output; 0 if only in the prompt; int32."""
        return self._counts[: self._n_seen]

    def add_output(self, tokens: Iterable[int]) -> None:
        """Count committed output tokens. Rows built before see the new counts, so build rows again after a commit."""
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
        """The last 72 bytes of ``sd_sample_row`` in ``cpu/csrc/sampling_view.h``, cached until the arrays grow.

        mask: a row's own in place of ``self.mask``; such a record is not cached, as the mask lives with the row.
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
            self.bias_ids.ctypes.data, self.bias_values.ctypes.data, self.bias_ids.shape[0] | words << 32,
            address, self.banned.ctypes.data, self.banned.shape[0] if ban else 0,
        )  # fmt: skip

    def _grow(self, token: int) -> None:
        if self._n_seen == self._ids.shape[0]:
            room = np.zeros(max(64, self._n_seen), np.int32)
            self._ids, self._counts = np.concatenate((self._ids, room)), np.concatenate((self._counts, room))
        self._ids[self._n_seen], self._counts[self._n_seen] = token, 0
        self._n_seen += 1
        self._records.clear()


class RowSampling(NamedTuple):
    """How a row is sampled. A named tuple, because one is built per tree node and step."""

    policy: SamplingPolicy
    position: int  # absolute position of the new token; with the policy's seed it keys the noise
    edits: SequenceEdits | None = None  # None: nothing changes the logits
    path: tuple[int, ...] = ()  # (token, output count, ...) of the node's path; overrides the counts of ``edits``
    ban: bool = False  # whether to mask ``edits.banned``
    mask: NDArray[np.uint32] | None = None  # the node's own in place of ``edits.mask``; needs ``edits``


Tokens = NDArray[np.int32]
Logprobs = NDArray[np.float64]
NO_TOKEN = -1  # the result of a row without a live logit
MAX_WIDTH = 64  # tokens per row that kernels return


class SamplingKernels(Protocol):
    """Samples rows. A row's result depends on that row alone: it is bitwise the same in any batch, for any threads.

    ``logits`` is float32 [rows, vocab], unit stride in a row. A logit is *live* if > -1e30; others, including NaN,
    count as masked, and live ones above 1e30 count as 1e30. A row without a live logit yields NO_TOKEN.
    """

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Tokens:
        """The token each row takes; int32 [rows]. Greedy: the lowest id of the largest processed logit."""

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> tuple[Tokens, Logprobs]:
        """The best ``width`` <= 64 tokens by z + noise under the row's filters (by logit when greedy), best first.

        Returns ids int32 [rows, width], padded with NO_TOKEN, and their log-probabilities float64 [rows, width] in
        the processed and filtered distribution (greedy: softmax of the processed logits).
        """

    def logprobs(self, logits: Tensor, tokens: Tokens, top: int) -> tuple[Logprobs, Tokens, Logprobs]:
        """log softmax of the logits as they are: of ``tokens`` int32 [rows], and the best ``top`` <= 20 per row.

        Returns chosen float64 [rows], ids int32 [rows, top] padded with NO_TOKEN, values float64 [rows, top], by
        falling probability, lower id first among equals.
        """
