"""What the first rank tells the others before each forward, as int32 in memory that they share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from verify_kernels.forward_batch import ForwardBatch

HEAD_WORDS = 5


@dataclass(slots=True)
class Command:
    """KV to be moved (global slots, in order), then a batch with the rows whose logits are wanted, or None."""

    source: list[int] = field(default_factory=list)
    target: list[int] = field(default_factory=list)
    batch: ForwardBatch | None = None
    logit_rows: Sequence[int] = ()

    @property
    def moves(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """``source`` and ``target`` as kernels take them."""
        return np.asarray(self.source, np.int64), np.asarray(self.target, np.int64)


def write_command(command: Command, words: NDArray[np.int32]) -> None:
    """Put ``command`` at the front of ``words``."""
    batch = command.batch
    parts: list[Sequence[int] | NDArray[np.int32]] = [command.source, command.target]
    shape = (0, 0, 0)
    if batch is not None:
        shape = (batch.rows, *batch.page_table.shape)
        parts += [
            batch.tokens, batch.entry_of, batch.parent, batch.depth, batch.diverge,
            batch.entry_start, batch.entry_ctx, batch.page_table.reshape(-1),
        ]  # fmt: skip
    head = (len(command.source), *shape, len(command.logit_rows))
    assert len(head) == HEAD_WORDS
    at = 0
    for part in (head, *parts, command.logit_rows):
        words[at : at + len(part)] = part
        at += len(part)


def read_command(words: NDArray[np.int32]) -> Command:
    """What `write_command` put there; shares no memory with it."""
    moves, rows, entries, width, logits = words[:HEAD_WORDS].tolist()
    sizes = (moves, moves, *[rows] * 5, entries + 1 if rows else 0, entries, entries * width, logits)
    flat = words[HEAD_WORDS : HEAD_WORDS + sum(sizes)].copy()
    source, target, *arrays, wanted = np.split(flat, np.cumsum(sizes)[:-1])
    batch = None
    if rows:
        tokens, entry_of, parent, depth, diverge, start, ctx, table = arrays
        batch = ForwardBatch(tokens, entry_of, parent, depth, diverge, start, ctx, table.reshape(entries, width))
    return Command(source.tolist(), target.tolist(), batch, wanted.tolist())
