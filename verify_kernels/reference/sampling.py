"""The sampler in plain numpy: every token's noise, a full sort, no short cut. Oracle of the native one."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.noise import gumbel, log_of_weight, softmax_weights
from verify_kernels.sampling import NO_TOKEN, Logprobs, RowSampling, SamplingPolicy, SequenceEdits, Tokens

Row = NDArray[np.float32]
Ids = NDArray[np.int64]
LIMIT = np.float32(1e30)


class ReferenceSampling:
    """`SamplingKernels` in numpy. Filters work on (z falling, id rising) order, of which each keeps a prefix."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Tokens:
        pairs = zip(logits.cpu().numpy(), rows, strict=True)
        return np.asarray([self._token(row, how) for row, how in pairs], np.int32)

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> tuple[Tokens, Logprobs]:
        ids = np.full((len(rows), width), NO_TOKEN, np.int32)
        values = np.full((len(rows), width), -np.inf)
        for at, (row, how) in enumerate(zip(logits.cpu().numpy(), rows, strict=True)):
            tokens, logprobs = self._best(row, how, width)
            ids[at, : len(tokens)], values[at, : len(tokens)] = tokens, logprobs
        return ids, values

    def logprobs(self, logits: Tensor, tokens: Tokens, top: int) -> tuple[Logprobs, Tokens, Logprobs]:
        chosen = np.full(len(tokens), -np.inf)
        ids = np.full((len(tokens), top), NO_TOKEN, np.int32)
        values = np.full((len(tokens), top), -np.inf)
        for at, (row, token) in enumerate(zip(logits.cpu().numpy(), tokens.tolist(), strict=True)):
            z = live(row)
            order = ranked(z)
            if token == NO_TOKEN or order.size == 0:
                continue
            logprobs = log_softmax(z, order)
            chosen[at] = logprobs[token]
            best = order[:top]
            ids[at, : best.size], values[at, : best.size] = best, logprobs[best]
        return chosen, ids, values

    def _token(self, row: Row, how: RowSampling) -> int:
        if how.policy.temperature > 0:
            return next(iter(self._best(row, how, 1)[0]), NO_TOKEN)
        z = processed_logits(row, how)  # not sorted: steps wait for this where there are no native kernels
        best = int(np.argmax(z))
        return best if np.isfinite(z[best]) else NO_TOKEN

    def _best(self, row: Row, how: RowSampling, width: int) -> tuple[Ids, Logprobs]:
        policy = how.policy
        z = processed_logits(row, how)
        if policy.temperature == 0:
            survivors = ranked(z)
            best = survivors[:width]
        else:
            z = z / np.float32(policy.temperature)
            survivors = self.filter(z, policy)
            x = z[survivors] + gumbel(policy.seed, how.position, survivors)
            best = survivors[np.lexsort((survivors, -x))[:width]]
        return best, log_softmax(z, survivors)[best] if best.size else np.zeros(0)

    def filter(self, z: Row, policy: SamplingPolicy) -> Ids:
        """The tokens that may be drawn, by falling z: top-k, then top-p of the rest, then min-p."""
        kept = top_k(z, ranked(z), policy.top_k)
        kept = top_p(z, kept, policy.top_p)
        return min_p(z, kept, policy.log_min_p)


def live(row: Row) -> Row:
    """``row`` with everything not above -1e30 (NaN too) at -inf, and everything above 1e30 at 1e30."""
    return np.where(row > -LIMIT, np.minimum(row, LIMIT), np.float32(-np.inf))


def processed_logits(row: Row, how: RowSampling) -> Row:
    """Penalties, then bias, then masks; float32 [vocab], -inf where masked."""
    z = live(row)
    if how.edits is None:
        return z
    edits, policy, raw = how.edits, how.policy, z.copy()
    if policy.penalises:
        _penalise(z, raw, edits.seen_ids, edits.seen_counts, policy)
        path = np.asarray(how.path, np.int32).reshape(-1, 2)
        _penalise(z, raw, path[:, 0], path[:, 1], policy)
    inside = edits.bias_ids < z.size
    np.add.at(z, edits.bias_ids[inside], edits.bias_values[inside])
    _mask(z, edits, how)
    return live(z)


def _penalise(z: Row, raw: Row, ids: NDArray[np.int32], counts: NDArray[np.int32], policy: SamplingPolicy) -> None:
    inside = ids < z.size
    ids, counts = ids[inside], counts[inside]
    repetition = np.float32(policy.repetition_penalty)
    value = np.where(raw[ids] > 0, raw[ids] / repetition, raw[ids] * repetition)
    value = value - np.float32(policy.frequency_penalty) * counts.astype(np.float32)
    z[ids] = np.where(counts > 0, value - np.float32(policy.presence_penalty), value)


def _mask(z: Row, edits: SequenceEdits, how: RowSampling) -> None:
    mask = edits.mask if how.mask is None else how.mask
    if mask is not None:
        bits = np.unpackbits(mask.astype("<u4").view(np.uint8), bitorder="little")[: z.size].astype(bool)
        z[: bits.size][~bits] = -np.inf
        z[bits.size :] = -np.inf
    if how.ban:
        z[edits.banned[edits.banned < z.size]] = -np.inf


def ranked(z: Row) -> Ids:
    """Ids of finite ``z`` by falling value, lower id first among equals."""
    order = np.argsort(-z, kind="stable")
    return order[np.isfinite(z[order])]


def top_k(z: Row, order: Ids, k: int) -> Ids:
    """The first ``k`` of ``order``; all when k is 0."""
    return order[:k] if k else order


def top_p(z: Row, order: Ids, p: float) -> Ids:
    """The shortest prefix of ``order``, one token at least, that holds ``p`` of the whole's probability.

    Probabilities are integers in units of 2^-44 of the best token's (see ``softmax_weights``): sums are exact.
    """
    if p >= 1 or order.size == 0:
        return order
    cumulative = np.cumsum(softmax_weights(z[order] - z[order[0]]))
    reached = cumulative.astype(np.float64) >= p * float(cumulative[-1])
    return order[: int(np.argmax(reached)) + 1]


def min_p(z: Row, order: Ids, log_min_p: float) -> Ids:
    """Tokens of ``order`` with z >= z_max + log(min_p), in float32."""
    if order.size == 0:
        return order
    return order[z[order] >= z[order[0]] + np.float32(log_min_p)]


def log_softmax(z: Row, support: Ids) -> Logprobs:
    """log softmax of ``z`` over ``support`` (by falling z); float64 [vocab], meaningful on ``support``."""
    best = z[support[0]]
    normaliser = log_of_weight(int(softmax_weights(z[support] - best).sum()))
    return (z.astype(np.float64) - float(best)) - normaliser + 0.0  # never -0
