"""Feeds a draft model the committed tokens it has not seen."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from specdec.models.target_decoder import TargetDecoder
from verify_kernels.forward_batch import BatchEntry, ForwardBatch


@dataclass(slots=True)
class Backlog:
    """ids: all tokens of a text, in the draft's vocabulary. start: the first to be fed, the last one at most. pages:
    where its KV goes. reached: told how many have theirs for good."""

    ids: Seq[int]
    start: int
    pages: Seq[int]
    reached: Callable[[int], None]


def catch_up(decoder: TargetDecoder, backlogs: Seq[Backlog]) -> Tensor | None:
    """Feed all of ``backlogs`` in as many forwards as they take; logits of each one's last token, float32
    [len(backlogs), vocab], or None where there are none.

    Short ones go on with the long: their last rows are fed once more.
    """
    while backlogs:
        entries, rows, done, total = [], [], [], 0
        for backlog in backlogs:
            chain = list(backlog.ids[backlog.start :][: decoder.max_rows - total])
            if not chain:
                continue
            entries.append(BatchEntry(chain, list(range(-1, len(chain) - 1)), backlog.start, backlog.pages))
            total += len(chain)
            if backlog.start + len(chain) == len(backlog.ids):
                rows.append(total - 1)
            done.append((backlog, min(backlog.start + len(chain), len(backlog.ids) - 1)))
        logits = decoder.forward(ForwardBatch.build(entries), rows)
        for backlog, upto in done:  # only now is it true
            backlog.start = upto
            backlog.reached(upto)
        if len(rows) == len(backlogs):
            return logits
    return None
