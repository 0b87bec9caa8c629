# mypy: disallow-untyped-defs=False

"""Sampling among the listed tokens of each row: the exact cut by top-k and top-p, and the choice with noise.

One program per row shortens its lists, by its filters, then by the noise's bounds, so that a handful is left: these
need the float64 logarithms of G, and dropped tokens cannot be chosen. In functions of a row's lists ``lists`` is its
`RowLists`, ``counts`` and the like are the lists' lengths, int32 [SPLITS].
"""

from __future__ import annotations

import triton
import triton.language as tl

from verify_kernels.gpu.kernel_launch import await_previous, exchange, specialised_on
from verify_kernels.gpu.sampling_math import (
    DEAD,
    LAST_ID,
    RowLists,
    append,
    gumbel,
    gumbel_bounds,
    keeps,
    list_tile,
    live,
    log_of_weight,
    noise_bits,
    order_key,
    reach,
    reached_by,
    read_logits,
    softmax_weight,
    value_of_key,
)
from verify_kernels.gpu.sampling_scan import inverse_of, temperature_of

_HIGHEST = tl.constexpr(0x7FFFFFFF)


@triton.jit
def find_cut(lists, places, spare, counts, z_max, row_weight, top_k, top_p, vocab):
    """z and id of the last token that top-k, then top-p of what that leaves, keep. ``spare``: room for a list."""
    cut_z, cut_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
    by_k = (top_k > 0) & (top_k < vocab)
    for stage in tl.static_range(2):  # each compiled by itself: together they spill a few bytes
        if top_p < 1.0 if stage == 1 else by_k:
            left, held, low = _take(lists, places, spare, counts, z_max, cut_z, cut_id, stage == 1)
            whole = tl.where(by_k, held, row_weight).to(tl.float64)
            need = top_p * whole if stage == 1 else top_k.to(tl.float64)
            if (held > 0) & (held.to(tl.float64) >= need):
                cut_z, cut_id = _search(lists, spare, left, z_max, low, need, stage == 1)
    return cut_z, cut_id


@triton.jit
def _amount(z, z_max, WEIGHS: tl.constexpr):
    """What a token counts in the search: 1 for top-k, its weight for top-p."""
    return softmax_weight(z - z_max) if WEIGHS else 1


@triton.jit
def _take(lists, places, spare, counts, z_max, cut_z, cut_id, WEIGHS: tl.constexpr):
    """Copy the tokens left by the cut into ``spare``: their counts, amount and lowest key."""
    # Sums and ends are kept by lane until the list's end: to reduce over all threads costs more than to read a tile.
    left, held = tl.zeros_like(counts), tl.zeros((lists.SPLITS, lists.COLUMNS), tl.int64)
    low = tl.full((lists.SPLITS, lists.COLUMNS), _HIGHEST, tl.int32)
    for column in range(0, tl.max(counts, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, places, counts, column)
        kept = present & keeps(z, token, cut_z, cut_id)
        held += tl.where(kept, _amount(z, z_max, WEIGHS), 0)
        low = tl.minimum(low, tl.where(kept, order_key(z), _HIGHEST))
        left = append(lists, spare, left, kept, token)
    exchange()
    return left, tl.sum(held), tl.min(low).to(tl.int64)


@triton.jit
def _search(lists, spare, left, z_max, low, need, WEIGHS: tl.constexpr):
    """z and id of the token with which the list, by falling z and rising id, first amounts to ``need``.

    A long list is halved, by turns in z (which finds most tails at once) and in keys (which never takes more than 32
    turns), and drops what is then decided; both ends of the range are listed tokens', so each turn drops some. A list
    of one tile stays in registers.
    """
    high = order_key(z_max).to(tl.int64)
    above, by_key = tl.full((), 0, tl.int64), low != low
    while (low < high) & (tl.max(left, axis=0) > lists.COLUMNS):
        center = order_key(value_of_key(low.to(tl.int32)) * 0.5 + value_of_key(high.to(tl.int32)) * 0.5).to(tl.int64)
        center = tl.minimum(tl.maximum(center, low + 1), high)
        middle = tl.where(by_key, low + ((high - low + 1) >> 1), center)
        by_key = by_key == 0
        lanes = tl.zeros((lists.SPLITS, lists.COLUMNS), tl.int64)
        for column in range(0, tl.max(left, axis=0), lists.COLUMNS):
            present, _, z = list_tile(lists, spare, left, column)
            lanes += tl.where(present & (order_key(z) >= middle), _amount(z, z_max, WEIGHS), 0)
        ahead = tl.sum(lanes)
        reached = (above + ahead).to(tl.float64) >= need
        above = tl.where(reached, above, above + ahead)
        left, end = _shorten(lists, spare, left, middle, reached)
        low, high = tl.where(reached, end, low), tl.where(reached, high, end)
    if low < high:
        present, _, z = list_tile(lists, spare, left, 0)
        key, amount = order_key(z).to(tl.int64), tl.where(present, _amount(z, z_max, WEIGHS), 0)
        while low < high:
            middle = low + ((high - low + 1) >> 1)
            reached = (above + tl.sum(tl.where(key >= middle, amount, 0))).to(tl.float64) >= need
            low, high = tl.where(reached, middle, low), tl.where(reached, high, middle - 1)
        above += tl.sum(tl.where(key > low, amount, 0))
    z = value_of_key(low.to(tl.int32))
    return z, _last_tie(lists, spare, left, z, above, _amount(z, z_max, WEIGHS), need)


@triton.jit
def _shorten(lists, spare, left, middle, upper):
    """Keep the keys from ``middle`` on, or those below: the counts, and the key kept that is nearest to ``middle``."""
    fewer, turn = tl.zeros_like(left), tl.where(upper, 0, -1)
    end = tl.full((lists.SPLITS, lists.COLUMNS), _HIGHEST, tl.int32)
    for column in range(0, tl.max(left, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, spare, left, column)
        key = order_key(z)
        kept = present & ((key >= middle) == upper)
        end = tl.minimum(end, tl.where(kept, key ^ turn, _HIGHEST))  # flipped bits turn the order round
        fewer = append(lists, spare, fewer, kept, token)
    exchange()
    return fewer, (tl.min(end) ^ turn).to(tl.int64)


@triton.jit
def _last_tie(lists, spare, left, cut_z, above, amount, need):
    """Of the listed tokens at ``cut_z``, ``amount`` each, the id with which ``above`` grows to ``need``.

    Lists are in the order of their ids, so the n-th tie is found by counting.
    """
    lanes = tl.zeros((lists.SPLITS, lists.COLUMNS), tl.int32)
    for column in range(0, tl.max(left, axis=0), lists.COLUMNS):
        present, _, z = list_tile(lists, spare, left, column)
        lanes += (present & (z == cut_z)).to(tl.int32)
    ties = tl.sum(lanes, axis=1)
    low, high = tl.full((), 1, tl.int32), tl.sum(ties, axis=0)
    while low < high:
        middle = (low + high) >> 1
        reached = (above + middle * amount).to(tl.float64) >= need
        low, high = tl.where(reached, low, middle + 1), tl.where(reached, middle, high)
    cut_ids = tl.full((lists.SPLITS, lists.COLUMNS), LAST_ID, tl.int32)
    before = tl.cumsum(ties, axis=0) - ties
    for column in range(0, tl.max(left, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, spare, left, column)
        tied = (present & (z == cut_z)).to(tl.int32)
        rank = before[:, None] + tl.cumsum(tied, axis=1)
        cut_ids = tl.minimum(cut_ids, tl.where((tied > 0) & (rank == high), token, LAST_ID))
        before += tl.sum(tied, axis=1)
    return tl.min(cut_ids)


@specialised_on("places", "spare")
def shorten_kernel(
    logits, temperature, inverse, seed, position, top_k, top_p, log_min_p, peak, places, spare, counts, weights,
    row_stride, vocab, width, splits,
    NOISE: tl.constexpr, FILTERS: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Rewrites ``places`` and ``counts`` of rows with top-k or top-p, with WIDE of all; then the ``weights`` of the
    former become what their filters leave. spare: as ``places``.
    """
    await_previous()
    row = tl.program_id(0)
    heat = temperature_of(temperature, row)
    cut = heat < 0.0
    cut_z, cut_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
    if FILTERS:
        k, p = tl.load(top_k + row), tl.load(top_p + row)
        cut = (heat > 0.0) & (((k > 0) & (k < vocab)) | (p < 1.0))
    if WIDE | cut:
        split = tl.arange(0, SPLITS)
        at, line = row * splits + split, logits + row.to(tl.int64) * row_stride
        own = places + row.to(tl.int64) * splits * TOKENS
        over = inverse_of(inverse, row)
        listed = tl.where(heat >= 0.0, tl.load(counts + at, mask=split < splits, other=0), 0)
        if FILTERS:  # noqa: SIM102
            if cut:
                z_max = tl.load(peak + row)
                total = tl.sum(tl.load(weights + at, mask=split < splits, other=0), axis=0)
                room = spare + row.to(tl.int64) * splits * TOKENS
                cut_z, cut_id = find_cut(
                    RowLists(line, over, TOKENS, SPLITS, COLUMNS), own, room, listed, z_max, total, k, p, vocab
                )
                floor = z_max + tl.load(log_min_p + row)
                cut_id = tl.where(floor > cut_z, LAST_ID, cut_id)
                cut_z = tl.maximum(cut_z, floor)
                if WIDE:
                    total = _weight_of(RowLists(line, over, TOKENS, SPLITS, COLUMNS), own, listed, z_max, cut_z, cut_id)
                    tl.store(weights + at, tl.where(split == 0, total, 0), mask=split < splits)
        key, where = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
        if NOISE:
            key, where = tl.load(seed + row), tl.load(position + row)
        listed = _narrow(
            RowLists(line, over, TOKENS, SPLITS, COLUMNS), own, listed, heat, key, where, cut_z, cut_id, width, NOISE
        )
        tl.store(counts + at, listed, mask=split < splits)


@triton.jit
def _weight_of(lists, places, counts, z_max, cut_z, cut_id):
    """Weight of the tokens left by the cut."""
    total = tl.zeros((lists.SPLITS, lists.COLUMNS), tl.int64)
    for column in range(0, tl.max(counts, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, places, counts, column)
        total += tl.where(present & keeps(z, token, cut_z, cut_id), softmax_weight(z - z_max), 0)
    return tl.sum(total)


@triton.jit
def _narrow(lists, places, counts, heat, seed, position, cut_z, cut_id, width, NOISE: tl.constexpr):
    """Keep the tokens that the cut leaves and that may be among the best ``width``: the counts that are left."""
    best = tl.full((lists.SPLITS, lists.COLUMNS), DEAD, tl.float32)
    for column in range(0, tl.max(counts, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, places, counts, column)
        low, _ = _bounds(z, token, heat, seed, position, NOISE)
        kept = present & keeps(z, token, cut_z, cut_id)
        best = tl.maximum(best, tl.where(kept, low, DEAD))
    least = reach(reached_by(best, width))
    left = tl.zeros_like(counts)
    for column in range(0, tl.max(counts, axis=0), lists.COLUMNS):
        present, token, z = list_tile(lists, places, counts, column)
        _, high = _bounds(z, token, heat, seed, position, NOISE)
        kept = present & keeps(z, token, cut_z, cut_id) & (high >= least)
        left = append(lists, places, left, kept, token)
    return left


@triton.jit
def _bounds(z, token, heat, seed, position, NOISE: tl.constexpr):
    """z + G from below and from above."""
    low, high = z, z
    if NOISE:
        below, above = gumbel_bounds(noise_bits(seed, position, token))
        low, high = tl.where(heat > 0.0, z + below, z), tl.where(heat > 0.0, z + above, z)
    return low, high


@specialised_on("places")
def choose_kernel(
    logits, temperature, inverse, seed, position, peak, places, counts, weights, tokens, chosen, ids, values,
    row_stride, vocab, width, splits,
    NOISE: tl.constexpr, WIDE: tl.constexpr,
    TOKENS: tl.constexpr, SPLITS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """ids: int32 [rows, width], -1 beyond the last; with WIDE, values: their log-probabilities, float64 [rows, width].

    tokens, chosen: where given, the log-probability of tokens int32 [rows]; float64 [rows]; a row without one (-1)
    has no ids either.
    """
    await_previous()
    row = tl.program_id(0)
    heat = temperature_of(temperature, row)
    split = tl.arange(0, SPLITS)
    listed = tl.where(heat >= 0.0, tl.load(counts + row * splits + split, mask=split < splits, other=0), 0)
    line, own = logits + row.to(tl.int64) * row_stride, places + row.to(tl.int64) * splits * TOKENS
    key, where = tl.full((), 0, tl.int64), tl.full((), 0, tl.int64)
    if NOISE:
        key, where = tl.load(seed + row), tl.load(position + row)
    z_max, normaliser = tl.full((), DEAD, tl.float32), tl.full((), 0.0, tl.float64)
    if WIDE:
        z_max = tl.where(heat >= 0.0, tl.load(peak + row), DEAD)
        total = tl.sum(tl.load(weights + row * splits + split, mask=split < splits, other=0), axis=0)
        normaliser = log_of_weight(tl.maximum(total, 1))
    if tokens is not None:
        token = tl.load(tokens + row)
        usable = (token >= 0) & (token < vocab) & (z_max > DEAD)
        listed = tl.where(usable, listed, 0)
        z = live(tl.load(line + token, mask=usable, other=DEAD))
        tl.store(chosen + row, _log_probability(z, z_max, normaliser))
    _write_best(
        RowLists(line, inverse_of(inverse, row), TOKENS, SPLITS, COLUMNS), own, listed, heat, key, where,
        z_max, normaliser, ids, values, row.to(tl.int64) * width, width, NOISE, WIDE,
    )  # fmt: skip


@triton.jit
def _log_probability(z, z_max, normaliser):
    """float64, never -0; -inf of a dead logit."""
    value = (z.to(tl.float64) - z_max.to(tl.float64)) - normaliser + 0.0
    return tl.where(z > DEAD, value, DEAD)


@triton.jit
def _scores(lists, places, counts, column, heat, seed, position, NOISE: tl.constexpr):
    """A tile's exact z + G and its tokens; -inf in padding."""
    present, token, z = list_tile(lists, places, counts, column)
    if NOISE:
        z = tl.where(heat > 0.0, z + gumbel(noise_bits(seed, position, token)), z)
    return tl.where(present, z, DEAD), token


@triton.jit
def _better(score, token, best, best_id):
    """The better of a tile's best and ``best``: the larger score, the lower id among equals."""
    top = tl.max(score)
    top_id = tl.min(tl.where((score == top) & (score > DEAD), token, LAST_ID))
    wins = (top > best) | ((top == best) & (top_id < best_id))
    return tl.where(wins, top, best), tl.where(wins, top_id, best_id)


@triton.jit
def _write_best(
    lists, places, counts, heat, seed, position, z_max, normaliser, ids, values, out, width,
    NOISE: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """The best ``width`` one after the other: each is the best of those after the one before."""
    most = tl.max(counts, axis=0)
    if WIDE:
        first, first_token = _scores(lists, places, counts, 0, heat, seed, position, NOISE)
        last, last_id = tl.full((), float("inf"), tl.float32), tl.full((), -1, tl.int32)
        for i in range(width):
            best, best_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
            score = tl.where(_after(first, first_token, last, last_id), first, DEAD)
            best, best_id = _better(score, first_token, best, best_id)
            for column in range(lists.COLUMNS, most, lists.COLUMNS):  # rarely any: first tiles hold most lists
                score, token = _scores(lists, places, counts, column, heat, seed, position, NOISE)
                score = tl.where(_after(score, token, last, last_id), score, DEAD)
                best, best_id = _better(score, token, best, best_id)
            last, last_id = best, best_id
            found = best > DEAD
            tl.store(ids + out + i, tl.where(found, best_id, -1))
            z = read_logits(lists.logits, best_id, found, lists.inverse)
            tl.store(values + out + i, _log_probability(z, z_max, normaliser))
    else:
        best, best_id = tl.full((), DEAD, tl.float32), tl.full((), LAST_ID, tl.int32)
        for column in range(0, most, lists.COLUMNS):
            score, token = _scores(lists, places, counts, column, heat, seed, position, NOISE)
            best, best_id = _better(score, token, best, best_id)
        tl.store(ids + out, tl.where(best > DEAD, best_id, -1))


@triton.jit
def _after(score, token, last, last_id):
    """Whether a token comes after the last one taken, by falling score and rising id."""
    return (score < last) | ((score == last) & (token > last_id))
