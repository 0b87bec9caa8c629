"""The rows of one step: every sequence's chain, then its tree."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass

from specdec.scheduler import PlanEntry
from specdec.tree import TokenTree
from verify_kernels.forward_batch import BatchEntry, ForwardBatch


@dataclass(frozen=True, slots=True)
class StepRows:
    """logit_rows: the rows of all tree nodes. offsets: where in these each entry's tree begins; first_rows: where in
    the batch each entry does; roots: its row that is the tree's root, -1 where it has none."""

    batch: ForwardBatch
    logit_rows: list[int]
    offsets: list[int]
    first_rows: list[int]
    roots: list[int]

    @staticmethod
    def of(entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> StepRows:
        """Rows of ``entries``, of which those without a tree only compute their chains."""
        batch_entries: list[BatchEntry] = []
        logit_rows: list[int] = []
        offsets: list[int] = []
        first_rows: list[int] = []
        roots: list[int] = []
        row = 0
        for entry, tree in zip(entries, trees, strict=True):
            seq, chain = entry.seq, entry.chain
            tokens = seq.tokens[seq.n_computed : seq.n_computed + chain]
            parents = list(range(-1, chain - 1))
            offsets.append(len(logit_rows))
            first_rows.append(row)
            roots.append(-1 if tree is None else chain)
            if tree is not None:
                tokens += tree.tokens
                parents += [chain - 1, *(chain + parent for parent in tree.parents[1:])]
                logit_rows += range(row + chain, row + chain + len(tree))
            row += len(tokens)
            batch_entries.append(BatchEntry(tokens, parents, seq.n_computed, seq.pages))
        return StepRows(ForwardBatch.build(batch_entries), logit_rows, offsets, first_rows, roots)
