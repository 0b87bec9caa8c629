"""A sequence's side of sampling: its parameters, what its past does to its logits, and the rows of its tree."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.sampling.token_grammar import TokenGrammar
from specdec.types import SamplingParams, StoppingParams
from verify_kernels.row_sampling import RowSampling
from verify_kernels.sampling_policy import SamplingPolicy
from verify_kernels.sequence_edits import SequenceEdits


class SequenceSampling:
    """Makes the `RowSampling` of each tree node of one sequence.

    seed: the sample's own (see ``sample_seed``). vocab_size: columns of the logits. Stop token ids and EOS are banned
    below ``min_tokens``, but never so that a request with allowed ids, or a node of its grammar, is left without
    any: such a ban is void.

    grammar: the sequence's own; each node's mask is joined to the allowed ids, and it moves on with `commit`.

    Raises:
        ValueError: a parameter is out of range, or an allowed or biased id lies outside the vocabulary.
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
        self.policy = SamplingPolicy(
            seed=seed, temperature=sampling.temperature, top_k=sampling.top_k, top_p=sampling.top_p,
            min_p=sampling.min_p, repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty, frequency_penalty=sampling.frequency_penalty,
        )  # fmt: skip
        _check_ids("allowed_token_ids", sampling.allowed_token_ids, vocab_size)
        _check_ids("logit_bias", [token for token, _ in sampling.logit_bias], vocab_size)
        banned = _banned(sampling, stopping, vocab_size, eos_ids)
        self._min_tokens = stopping.min_tokens if banned else 0
        self._penalises = self.policy.penalises
        edited = self._penalises or bool(sampling.logit_bias) or bool(sampling.allowed_token_ids)
        self._always = edited or grammar is not None
        self._unbanned = None if grammar is None else ~_mask(banned, vocab_size)
        self._edits = SequenceEdits(
            bias_ids=np.asarray([token for token, _ in sampling.logit_bias], np.int32),
            bias_values=np.asarray([bias for _, bias in sampling.logit_bias], np.float32),
            mask=_mask(sampling.allowed_token_ids, vocab_size) if sampling.allowed_token_ids else None,
            banned=np.asarray(banned, np.int32),
            seen=prompt_ids if sampling.repetition_penalty != 1 else (),
        )

    def commit(self, tokens: Iterable[int]) -> None:
        """Move accepted tokens into the base state. Rows made before are stale after it."""
        taken = list(tokens)
        if self._penalises:
            self._edits.add_output(taken)
        if self.grammar is not None:
            self.grammar.commit(taken)

    def row(self, position: int, path: Sequence[int], n_output: int) -> RowSampling:
        """The sampling of the token that will occupy ``position``.

        path: the tokens between the committed ones and this one, in order. n_output: output tokens before this one,
        committed and on the path.
        """
        if not self._always and n_output >= self._min_tokens:
            return RowSampling(self.policy, position)
        counts = self._edits.path_counts(path) if self._penalises and path else ()
        ban = n_output < self._min_tokens
        if self.grammar is None or self._unbanned is None:
            return RowSampling(self.policy, position, self._edits, counts, ban)
        mask = self.grammar.mask(path)
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


def _mask(ids: Sequence[int], vocab_size: int) -> NDArray[np.uint32]:
    bits = np.zeros(-(-vocab_size // 32) * 32, np.uint8)
    bits[np.asarray(ids, np.int64)] = 1
    return np.packbits(bits, bitorder="little").view("<u4").astype(np.uint32)


def _check_ids(name: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{name}: {wrong[0]} lies outside the vocabulary of {vocab_size}")
