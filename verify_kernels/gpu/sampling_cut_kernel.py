"""Where top-k and top-p cut a row: a search over the listed tokens, in integers, so that no order of sums matters."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.sampling_list_kernel import append, keeps, list_tile
from verify_kernels.gpu.sampling_math_kernel import DEAD, LAST_ID, order_key, softmax_weight, value_of_key

_LOWEST = tl.constexpr(-0x80000000)
_HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_cut(
    places, spare, counts, row, inverse, z_max, row_weight, top_k, top_p, vocab,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """z and id of the last token that top-k, then top-p of what that leaves, keep. ``spare``: room for a list."""
    cut_z, cut_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
    by_k = (top_k > 0) & (top_k < vocab)
    for stage in range(2):
        weighs = stage == 1
        if tl.where(weighs, top_p < 1.0, by_k):
            left, held, low, high = _take(
                places, spare, counts, row, inverse, z_max, cut_z, cut_id, weighs, TOKENS, SPLITS, COLUMNS
            )  # fmt: skip
            whole = tl.where(by_k, held, row_weight).to(tl.float64)
            need = tl.where(weighs, top_p * whole, top_k.to(tl.float64))
            if (held > 0) & (held.to(tl.float64) >= need):
                cut_z, cut_id = _search(
                    spare, left, row, inverse, z_max, low, high, need, weighs, TOKENS, SPLITS, COLUMNS
                )  # fmt: skip
    return cut_z, cut_id


@triton.jit
def _amount(z, z_max, weighs):
    """What a token counts in the search: 1 for top-k, its weight for top-p."""
    return tl.where(weighs, softmax_weight(z - z_max), 1)


@triton.jit
def _take(
    places, spare, counts, row, inverse, z_max, cut_z, cut_id, weighs,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy what the cut leaves into ``spare``: its counts, its amount, its lowest and highest key."""
    left, held = tl.zeros_like(counts), tl.full((), 0, tl.int64)
    low, high = tl.full((), _HIGHEST, tl.int64), tl.full((), _LOWEST, tl.int64)
    for column in range(0, tl.max(counts, axis=0), COLUMNS):
        present, token, z = list_tile(places, counts, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        kept = present & keeps(z, token, cut_z, cut_id)
        held += tl.sum(tl.where(kept, _amount(z, z_max, weighs), 0))
        low, high = _range(z, kept, low, high)
        left = append(spare, left, kept, token, TOKENS, SPLITS)
    tl.debug_barrier()
    return left, held, low, high


@triton.jit
def _range(z, kept, low, high):
    """``low`` and ``high`` with the keys of the ``kept`` taken in."""
    key = order_key(z)
    low = tl.minimum(low, tl.min(tl.where(kept, key, _HIGHEST)).to(tl.int64))
    return low, tl.maximum(high, tl.max(tl.where(kept, key, _LOWEST)).to(tl.int64))


@triton.jit
def _search(
    spare, left, row, inverse, z_max, low, high, need, weighs,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """z and id of the token with which the list, by falling z and rising id, first amounts to ``need``.

    A long list is halved, by turns in z (which finds most tails at once) and in keys (which never takes more than 32
    turns), and drops what is then decided; both ends of the range are listed tokens', so each turn drops some. A list
    of one tile stays in registers.
    """
    above, by_key = tl.full((), 0, tl.int64), low != low
    while (low < high) & (tl.max(left, axis=0) > COLUMNS):
        center = order_key(value_of_key(low.to(tl.int32)) * 0.5 + value_of_key(high.to(tl.int32)) * 0.5).to(tl.int64)
        center = tl.minimum(tl.maximum(center, low + 1), high)
        middle = tl.where(by_key, low + ((high - low + 1) >> 1), center)
        by_key = by_key == 0
        ahead = tl.full((), 0, tl.int64)
        for column in range(0, tl.max(left, axis=0), COLUMNS):
            present, _, z = list_tile(spare, left, column, row, inverse, TOKENS, SPLITS, COLUMNS)
            ahead += tl.sum(tl.where(present & (order_key(z) >= middle), _amount(z, z_max, weighs), 0))
        reached = (above + ahead).to(tl.float64) >= need
        above = tl.where(reached, above, above + ahead)
        left, low, high = _shorten(spare, left, row, inverse, middle, reached, TOKENS, SPLITS, COLUMNS)
    if low < high:
        present, _, z = list_tile(spare, left, 0, row, inverse, TOKENS, SPLITS, COLUMNS)
        key, amount = order_key(z).to(tl.int64), tl.where(present, _amount(z, z_max, weighs), 0)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            reached = (above + tl.sum(tl.where(key >= middle, amount, 0))).to(tl.float64) >= need
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
        above += tl.sum(tl.where(key > low, amount, 0))
    z = value_of_key(low.to(tl.int32))
    return z, _last_tie(spare, left, row, inverse, z, above, _amount(z, z_max, weighs), need, TOKENS, SPLITS, COLUMNS)


@triton.jit
def _shorten(
    spare, left, row, inverse, middle, upper, TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Keep the keys from ``middle`` on, or those below: the counts, the lowest and the highest key."""
    fewer = tl.zeros_like(left)
    low, high = tl.full((), _HIGHEST, tl.int64), tl.full((), _LOWEST, tl.int64)
    for column in range(0, tl.max(left, axis=0), COLUMNS):
        present, token, z = list_tile(spare, left, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        kept = present & ((order_key(z) >= middle) == upper)
        low, high = _range(z, kept, low, high)
        fewer = append(spare, fewer, kept, token, TOKENS, SPLITS)
    tl.debug_barrier()
    return fewer, low, high


@triton.jit
def _last_tie(
    spare, left, row, inverse, cut_z, above, amount, need,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Of the listed tokens at ``cut_z``, ``amount`` each, the id with which ``above`` grows to ``need``.

    Lists are in the order of their ids, so the n-th tie is found by counting.
    """
    ties = tl.zeros_like(left)
    for column in range(0, tl.max(left, axis=0), COLUMNS):
        present, _, z = list_tile(spare, left, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        ties += tl.sum((present & (z == cut_z)).to(tl.int32), axis=1)
    low, high = tl.full((), 1, tl.int32), tl.sum(ties, axis=0)
    while low < high:
        middle = (low + high) >> 1
        reached = (above + middle * amount).to(tl.float64) >= need
        low, high = tl.where(reached, low, middle + 1), tl.where(reached, middle, high)
    cut_id = tl.full((), LAST_ID, tl.int32)
    before = tl.cumsum(ties, axis=0) - ties
    for column in range(0, tl.max(left, axis=0), COLUMNS):
        present, token, z = list_tile(spare, left, column, row, inverse, TOKENS, SPLITS, COLUMNS)
        tied = (present & (z == cut_z)).to(tl.int32)
        rank = before[:, None] + tl.cumsum(tied, axis=1)
        cut_id = tl.minimum(cut_id, tl.min(tl.where((tied > 0) & (rank == high), token, LAST_ID)))
        before += tl.sum(tied, axis=1)
    return cut_id
