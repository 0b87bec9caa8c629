"""Turns rows of logits into tokens, log-probabilities and a drafter's children."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.sampling.sampled_rows import SampledRows
from specdec.types import TokenLogprobs
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_kernels import MAX_LOGPROBS, MAX_WIDTH, NO_TOKEN, SamplingKernels


class Sampler:
    """Samples each row by itself: a row's result depends on no other row, nor on the number of threads.

    Target and drafters use the same kernels and the same noise, which is what makes the tree walk exact.
    """

    def __init__(self, kernels: SamplingKernels, threads: int) -> None:
        self._kernels = kernels
        self._threads = threads

    def sample(
        self, logits: Tensor, rows: Sequence[RowSampling], top_logprobs: Sequence[int | None] | None = None
    ) -> SampledRows:
        """The token of every row, and log-probabilities of the unprocessed logits where asked for.

        logits: float32 [rows, vocab] where the kernels can read it. top_logprobs[r]: None for no log-probabilities,
        else how many of the best tokens to report besides the chosen one (at most 20); None in place of the list: none
        anywhere.

        Raises:
            ValueError: ``logits`` is of another type or shape, or more than 20 log-probabilities are asked for.
        """
        _check(logits, rows)
        if not rows:
            return SampledRows([], [])
        if all(row.edits is None and row.policy.temperature == 0 for row in rows):
            tokens = self._kernels.greedy(logits, self._threads)
        else:
            tokens = self._kernels.sample(logits, rows, self._threads)
        if top_logprobs is None or all(top is None for top in top_logprobs):
            return SampledRows(tokens.tolist(), [None] * len(rows))
        return SampledRows(tokens.tolist(), self._logprobs(logits, tokens, top_logprobs))

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> list[list[tuple[int, float]]]:
        """Per row the ``width`` tokens most likely to be the target's choice, best first, with log-probabilities.

        They are the best by z + noise under the row's own filters: a sample without replacement that shares the
        target's noise. A filter may leave fewer than ``width``. Greedy rows: the best by processed logit.

        Raises:
            ValueError: ``logits`` is of another type or shape, or ``width`` is not within 1 to 64.
        """
        _check(logits, rows)
        if not 1 <= width <= MAX_WIDTH:
            raise ValueError(f"width: must be within 1 to {MAX_WIDTH}, got {width}")
        if not rows:
            return []
        ids, values = self._kernels.children(logits, rows, width, self._threads)
        return [_pairs(i, v) for i, v in zip(ids, values, strict=True)]

    def _logprobs(
        self, logits: Tensor, tokens: NDArray[np.int32], top_logprobs: Sequence[int | None]
    ) -> list[TokenLogprobs | None]:
        result: list[TokenLogprobs | None] = [None] * len(tokens)
        wanted = [r for r, top in enumerate(top_logprobs) if top is not None and tokens[r] != NO_TOKEN]
        if not wanted:
            return result
        tops = [top for top in top_logprobs if top is not None]
        if not 0 <= min(tops) <= max(tops) <= MAX_LOGPROBS:
            raise ValueError(f"top_logprobs: must be within 0 to {MAX_LOGPROBS}, got {max(tops)}")
        chosen_rows = logits if len(wanted) == len(tokens) else logits[wanted]
        chosen, ids, values = self._kernels.logprobs(chosen_rows, tokens[wanted], max(tops), self._threads)
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
