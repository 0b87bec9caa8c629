"""Depths and ancestor words of rows, each row climbing on its own."""

# mypy: disallow-untyped-defs=False
from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(
    do_not_specialize=[
        "parent", "entry_of", "entry_start", "root_row", "depth", "anc", "n_rows", "n_entries", "n_words", "max_depth",
    ]
)  # fmt: skip
def tree_build_kernel(
    parent, entry_of, entry_start, root_row, depth, anc, n_rows, n_entries, n_words, max_depth,
    ROWS: tl.constexpr, WORDS: tl.constexpr,
):  # fmt: skip
    """Program (block of rows, block of words). Only draft nodes climb: what lies below is a chain."""
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    word = tl.program_id(1) * WORDS + tl.arange(0, WORDS)[None, :]
    given = row < n_rows
    entry = tl.load(entry_of + row, mask=given, other=-1)
    known = (entry >= 0) & (entry < n_entries)
    first = tl.load(entry_start + entry, mask=known, other=0)
    last = tl.load(entry_start + entry + 1, mask=known, other=0)
    live = known & (first >= 0) & (row >= first) & (row < last)
    root = tl.load(root_row + entry, mask=live, other=-1)
    root = tl.where(root < 0, last - first, root)

    one = tl.full([ROWS, WORDS], 1, tl.int64)
    bits = tl.zeros([ROWS, WORDS], tl.int64)
    at = tl.where(live, row - first, -1)
    steps = tl.zeros([ROWS], tl.int32)
    for _ in range(0, max_depth):
        climbs = live & (at > root)
        here = climbs[:, None] & ((at >> 6)[:, None] == word)
        bits |= tl.where(here, one << (at & 63)[:, None], 0)
        up = tl.load(parent + first + at, mask=climbs, other=-1)
        # A parent that does not precede its child would lead out of the entry; it ends the climb.
        up = tl.where((up < at) & (up >= 0), up, -1)
        at = tl.where(climbs, up, at)
        steps += climbs.to(tl.int32)
    live &= at <= root

    chain = tl.minimum(tl.maximum(at[:, None] + 1 - word * 64, 0), 64)
    bits |= tl.where(chain == 64, -1, (one << tl.minimum(chain, 63)) - 1)
    tl.store(depth + row, tl.where(live, steps + at, 0), mask=row < tl.where(tl.program_id(1) == 0, n_rows, 0))
    out = anc + row.to(tl.int64)[:, None] * n_words + word
    tl.store(out, tl.where(live[:, None], bits, 0), mask=given[:, None] & (word < n_words))
