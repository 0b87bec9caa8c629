"""Sampling of tree nodes: the token of each row of logits, by noise keyed on (seed, position, token)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields
from functools import lru_cache
from typing import Protocol

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from specdec.core.types import SamplingParams, StoppingParams, TokenLogprobs
from specdec.errors import StageError
from verify_kernels.sampling import MAX_WIDTH, NO_TOKEN, RowSampling, SamplingKernels, SamplingPolicy, SequenceEdits

# The sampling parameters that the kernels use; the seed is the sample's.
_OF_POLICY = {f.name for f in fields(SamplingPolicy) if f.init} & {f.name for f in fields(SamplingParams)} - {"seed"}


class TokenGrammar(Protocol):
    """The state of a grammar after the committed tokens, and after paths of a tree above them."""

    error: str
    """The complexity limit that the grammar ran into, or empty."""

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``: uint32 [ceil(vocab / 32)], bit v & 31 of word v >> 5 set: v may follow."""

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """At most ``limit`` of the tokens that must follow ``path``; often none. Drafts are made of them."""

    def commit(self, tokens: Iterable[int]) -> TokenGrammar | None:
        """Advance by ``tokens``; returns the grammar of what follows, or None if any token may follow from now on."""


class SequenceSampling:
    """Makes the `RowSampling` of each tree node of one sequence.

    seed: the sample's own (`core.types.sample_seed`). vocab_size: columns of the logits. Stop token ids and EOS are
    banned below ``min_tokens``, unless that would leave no token: then the ban is void. grammar: each node's mask is
    intersected with the allowed ids; `commit` advances it, and drops it once it allows all. The request has passed
    `check_requests`.
    """

    def __init__(
        self,
        sampling: SamplingParams,
        stopping: StoppingParams,
        seed: int,
        vocab_size: int,
        eos_ids: Iterable[int],
        prompt_ids: Sequence[int],
        grammar: TokenGrammar | None = None,
    ) -> None:
        self.grammar = grammar
        self.policy = SamplingPolicy(seed=seed, **{name: getattr(sampling, name) for name in _OF_POLICY})
        banned = _banned(sampling, stopping, vocab_size, eos_ids)
        self._min_tokens = stopping.min_tokens if banned else 0
        self._penalises = self.policy.penalises
        self._edited = self._penalises or bool(sampling.logit_bias) or bool(sampling.allowed_token_ids)
        self._unbanned = None if grammar is None else ~token_mask(banned, vocab_size)
        biases: dict[int, float] = {}
        for token, bias in sampling.logit_bias:
            biases[token] = biases.get(token, 0.0) + bias
        self._edits = SequenceEdits(
            bias_ids=np.asarray([*biases], np.int32),
            bias_values=np.asarray([*biases.values()], np.float32),
            mask=_allowed_mask(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None,
            banned=np.asarray(banned, np.int32),
            seen=prompt_ids if sampling.repetition_penalty != 1 else (),
        )

    def commit(self, tokens: Iterable[int]) -> None:
        """Advance by accepted tokens. Rows made before are stale."""
        taken = list(tokens)
        if self._penalises:
            self._edits.add_output(taken)
        if self.grammar is not None:
            try:
                self.grammar = self.grammar.commit(taken)
            except Exception as error:
                raise StageError.of(error, "grammar") from error

    def row(self, position: int, path: Sequence[int], n_output: int) -> RowSampling:
        """The sampling of the token that will occupy ``position``.

        path: the tokens between the committed ones and this one, in order. n_output: output tokens before this one,
        committed and on the path.
        """
        if not self._edited and self.grammar is None and n_output >= self._min_tokens:
            return RowSampling(self.policy, position)
        counts = self._edits.path_counts(path) if self._penalises and path else ()
        ban = n_output < self._min_tokens
        if self.grammar is None or self._unbanned is None:
            return RowSampling(self.policy, position, self._edits, counts, ban)
        try:
            mask = self.grammar.mask(path)
        except Exception as error:
            raise StageError.of(error, "grammar") from error
        if self._edits.mask is not None:
            mask = mask & self._edits.mask
        ban = ban and bool((mask & self._unbanned).any())
        return RowSampling(self.policy, position, self._edits, counts, ban, mask)


def _banned(
    sampling: SamplingParams, stopping: StoppingParams, vocab_size: int, eos_ids: Iterable[int]
) -> tuple[int, ...]:
    if stopping.min_tokens <= 0:
        return ()
    banned = {token for token in (*eos_ids, *stopping.stop_token_ids) if 0 <= token < vocab_size}
    allowed = set(sampling.allowed_token_ids) or range(vocab_size)
    return tuple(sorted(banned)) if any(token not in banned for token in allowed) else ()


@lru_cache(maxsize=4)
def _allowed_mask(ids: tuple[int, ...], vocab_size: int) -> NDArray[np.uint32]:
    """As `token_mask`, computed once for the samples of a request."""
    mask = token_mask(ids, vocab_size)
    mask.flags.writeable = False
    return mask


def token_mask(ids: ArrayLike, vocab_size: int) -> NDArray[np.uint32]:
    """The mask of ``ids``: uint32 [ceil(vocab / 32)], bit v & 31 of word v >> 5 set for each id v."""
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


class Sampler:
    """Samples rows independently: a row's result depends neither on other rows nor on the number of threads.

    Target and drafters use the same kernels and the same noise, so acceptance is exact.
    """

    def __init__(self, kernels: SamplingKernels) -> None:
        self._kernels = kernels

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], top_logprobs: Sequence[int | None] | None = None
    ) -> list[tuple[int, TokenLogprobs | None]]:
        """Sample every row, with log-probabilities of the unprocessed logits if requested.

        Returns tokens, NO_TOKEN (-1) where a row has no usable logit, so that its request fails, each with its
        log-probabilities; None: not requested, or there is no token.

        logits: float32 [rows, vocab] in the kernels' memory. top_logprobs: by row, how many of the best tokens to
        report besides the chosen one, at most 20 (`OutputParams`); None: no log-probabilities.

        Raises:
            ValueError: ``logits`` is of another type or shape.
        """
        _check(logits, rows)
        if not rows:
            return []
        tokens = self._kernels.sample(logits, rows)
        if top_logprobs is None or all(top is None for top in top_logprobs):
            return [(token, None) for token in tokens.tolist()]
        return list(zip(tokens.tolist(), self._logprobs(logits, tokens, top_logprobs), strict=True))

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> list[list[tuple[int, float]]]:
        """Per row, the ``width`` tokens most likely to be the target's choice, best first, with log-probabilities.

        They are the best by z + noise under the row's filters: a sample without replacement that shares the target's
        noise. Filters may leave fewer. Greedy rows: the best by processed logit.

        Raises:
            ValueError: ``logits`` is of another type or shape, or ``width`` is not within 1 to 64.
        """
        _check(logits, rows)
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"width: must be within 1 to {MAX_WIDTH}, got {width}")
        if not rows:
            return []
        ids, values = self._kernels.children(logits, rows, width)
        return [_pairs(i, v) for i, v in zip(ids, values, strict=True)]

    def _logprobs(
        self, logits: Tensor, tokens: NDArray[np.int32], top_logprobs: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(tokens)
        wanted = [r for r, top in enumerate(top_logprobs) if top is not None and tokens[r] != NO_TOKEN]
        most = max(top for top in top_logprobs if top is not None)
        chosen_rows = logits if len(wanted) == len(tokens) else logits[wanted]
        chosen, ids, values = self._kernels.logprobs(chosen_rows, tokens[wanted], most)
        for at, r in enumerate(wanted):
            top = top_logprobs[r]
            best = _pairs(ids[at, :top], values[at, :top])
            result[r] = TokenLogprobs(int(tokens[r]), float(chosen[at]), best)
        return result


def _pairs(ids: NDArray[np.int32], values: NDArray[np.float64]) -> list[tuple[int, float]]:
    return [pair for pair in zip(ids.tolist(), values.tolist(), strict=True) if pair[0] != NO_TOKEN]


def _check(logits: Tensor, rows: Sequence[RowSampling]) -> None:
    if logits.dtype != torch.float32 or logits.ndim != 2 or logits.stride(1) != 1:
        raise ValueError(f"logits: must be float32 [rows, vocab], got {logits.dtype} {tuple(logits.shape)}")
    if logits.shape[0] != len(rows):
        raise ValueError(f"logits: {logits.shape[0]} rows for {len(rows)} row samplings")
