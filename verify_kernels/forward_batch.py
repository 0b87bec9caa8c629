"""The rows of one forward pass: their sequences, their places in trees, and where their KV goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PAGE_SIZE = 64  # tokens of a KV page
NEVER = 1 << 30  # deeper than any tree


class BatchEntry(NamedTuple):
    """One sequence's rows: a chain of committed tokens, then a tree rooted at its last one. A named tuple, because one
    is built per sequence and step.
    """

    tokens: Sequence[int]
    parents: Sequence[int]  # row of the entry, -1 for row 0; row i of the leading chain has parent i - 1
    ctx: int  # filled slots; row i is written to slot ctx + i
    pages: Sequence[int]  # the sequence's page ids


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """Rows of all entries, flattened."""

    tokens: NDArray[np.int32]  # [rows]
    entry_of: NDArray[np.int32]  # [rows]
    parent: NDArray[np.int32]  # [rows] row of the entry
    depth: NDArray[np.int32]  # [rows] position less ctx
    diverge: NDArray[np.int32]  # [rows] first depth of the row's path whose slot is not its position, or NEVER
    entry_start: NDArray[np.int32]  # [entries + 1] first row
    entry_ctx: NDArray[np.int32]  # [entries]
    page_table: NDArray[np.int32]  # [entries, max_pages]

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.tokens.shape[0]

    @staticmethod
    def build(entries: Sequence[BatchEntry]) -> ForwardBatch:
        """Flatten ``entries``.

        Raises:
            ValueError: an entry is empty, a parent does not precede its child, or pages do not cover the slots.
        """
        tokens: list[int] = []
        entry_of: list[int] = []
        parents: list[int] = []
        depths: list[int] = []
        diverges: list[int] = []
        starts = [0]
        table: list[int] = []
        widest = max(len(entry.pages) for entry in entries)
        for index, entry in enumerate(entries):
            _walk(entry, depths, diverges)
            tokens += entry.tokens
            parents += entry.parents
            entry_of += [index] * len(entry.tokens)
            starts.append(len(tokens))
            table += entry.pages
            table += [0] * (widest - len(entry.pages))
        # One conversion for all arrays: they are small, and every call into numpy costs as much as their conversion.
        parts = (tokens, entry_of, parents, depths, diverges, starts, [entry.ctx for entry in entries], table)
        flat = np.fromiter(chain.from_iterable(parts), np.int32, sum(map(len, parts)))
        cut, views = 0, []
        for part in parts:
            views.append(flat[cut : cut + len(part)])
            cut += len(part)
        ids, owner, parent, depth, diverge, start, ctx, pages = views
        return ForwardBatch(ids, owner, parent, depth, diverge, start, ctx, pages.reshape(len(entries), widest))


def _walk(entry: BatchEntry, depths: list[int], diverges: list[int]) -> None:
    n = len(entry.tokens)
    if n == 0 or len(entry.parents) != n:
        raise ValueError(f"entry: {n} tokens and {len(entry.parents)} parents; must be equal and not zero")
    if len(entry.pages) * PAGE_SIZE < entry.ctx + n:
        raise ValueError(f"pages: {len(entry.pages)} pages do not hold {entry.ctx + n} slots")
    if list(entry.parents) == list(range(-1, n - 1)):  # a chain, such as a prompt
        depths += range(n)
        diverges += [NEVER] * n
        return
    base = len(depths)
    for row, parent in enumerate(entry.parents):
        if not -1 <= parent < row or (parent == -1) != (row == 0):
            raise ValueError(f"parents: row {row} names parent {parent}; parents precede children, row 0 has -1")
        depth = depths[base + parent] + 1 if row else 0
        diverge = diverges[base + parent] if row else NEVER
        depths.append(depth)
        diverges.append(min(diverge, depth) if depth != row else diverge)
