"""Verify: one target forward over prompts and trees, acceptance down each tree, the move of accepted KV."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.sampling import Sampler
from specdec.core.tree import TokenTree
from specdec.core.types import TokenLogprobs
from specdec.engine.scheduler import PlanEntry
from specdec.errors import StageError
from specdec.models.decoder import TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import NO_TOKEN, RowSampling


@dataclass(slots=True)
class Acceptance:
    """The outcome of one sequence's tree."""

    nodes: list[int] = field(default_factory=list)
    """Accepted nodes, from the root's child down."""
    tokens: list[int] = field(default_factory=list)
    """Emitted tokens, one more than nodes."""
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    broken: bool = False
    """A row had no usable logit: the tokens end there and the request fails."""
    fault: StageError | None = None
    """Sampling raised for this sequence: the request fails."""


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward. The last two lists are by entry."""

    batch: ForwardBatch
    logit_rows: list[int]
    """Rows of all tree nodes."""
    offsets: list[int]
    """Index in `logit_rows` of the tree's root."""
    roots: list[int]
    """The entry's row that is the tree's root; -1: no tree."""

    @staticmethod
    def of(entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> StepRows:
        """Rows of ``entries``; those without a tree compute only their prefill chunk."""
        batch_entries: list[BatchEntry] = []
        logit_rows: list[int] = []
        offsets: list[int] = []
        roots: list[int] = []
        row = 0
        for entry, tree in zip(entries, trees, strict=True):
            seq, prefill = entry.seq, entry.prefill
            offsets.append(len(logit_rows))
            roots.append(-1 if tree is None else prefill)
            if tree is not None and not prefill:  # most entries of most steps
                tokens, parents = tree.tokens, tree.parents
            else:
                tokens = seq.tokens[seq.n_computed : seq.n_computed + prefill]
                parents = list(range(-1, prefill - 1))
                if tree is not None:
                    tokens += tree.tokens
                    parents += [prefill - 1, *(prefill + parent for parent in tree.parents[1:])]
            rows = len(tokens)
            if tree is not None:
                logit_rows += range(row + prefill, row + rows)
            row += rows
            batch_entries.append(BatchEntry(tokens, parents, seq.n_computed, seq.pages))
        return StepRows(ForwardBatch.build(batch_entries), logit_rows, offsets, roots)


class StepVerifier(ABC):
    """`Verifier` on a CPU, `DeviceVerifier` (`specdec.engine.device_verify`) on a GPU."""

    overlaps: bool
    """Whether `start` returns before the result is there."""

    def __init__(self, decoder: TargetDecoder) -> None:
        self._decoder = decoder
        self._entry_start = np.zeros(0, np.int32)  # `ForwardBatch.entry_start` of the last step

    @property
    def keeps_aux_states(self) -> bool:
        """Whether the target keeps auxiliary hidden states for a feature head."""
        return bool(self._decoder.aux_layers)

    def features(self, index: int, prefill: int, acceptance: Acceptance, count: int) -> Tensor:
        """Hidden states of the last step's entry ``index``: the first ``count`` of its prompt rows, root and accepted
        path, float32 [count, layers * hidden] in CPU memory."""
        first = int(self._entry_start[index])
        rows = [*range(first, first + prefill + 1), *(first + prefill + node for node in acceptance.nodes)]
        return self._decoder.aux_hidden_states[rows[:count]].float().cpu()

    def final_states(self, index: int, rows: range) -> NDArray[np.float64]:
        """Hidden states after the final norm of ``rows`` of the last step's entry ``index``, [rows, hidden]."""
        first = int(self._entry_start[index])
        return self._decoder.final_states(slice(first + rows.start, first + rows.stop))

    @abstractmethod
    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """Start to forward all rows, accept down all trees and move the accepted KV.

        Returns a function that waits for the result, one `Acceptance` per entry. Call it before the next `start`.
        """


class Verifier(StepVerifier):
    """The verifier of a CPU, and of a GPU whose kernels for sampling or acceptance fail their self-test.

    At each node it samples the target's token as plain decode does, and continues in the child that holds it, if there
    is one. The tree decides how many tokens a step yields, never which.
    """

    overlaps = False

    def __init__(self, decoder: TargetDecoder, sampler: Sampler) -> None:
        super().__init__(decoder)
        self._sampler = sampler

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """See `StepVerifier.start`; the result is there on return."""
        logits, places = self._forward(entries, trees)
        accepted = [Acceptance() for _ in entries]
        active = [(i, 0) for i, tree in enumerate(trees) if tree is not None]
        while active:
            active = self._descend(active, logits, places, entries, trees, accepted)
        self._move(entries, accepted)
        return lambda: accepted

    def _forward(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> tuple[Tensor, list[list[int]]]:
        """Logits of all tree nodes, and by entry the index of each node's.

        The roots come first: all of them are sampled, and rows side by side are sampled without a copy.
        """
        rows = StepRows.of(entries, trees)
        self._entry_start = rows.batch.entry_start
        firsts = {first for first, tree in zip(rows.offsets, trees, strict=True) if tree is not None}
        order = sorted(range(len(rows.logit_rows)), key=lambda at: at not in firsts)
        place = {at: i for i, at in enumerate(order)}
        sizes = [0 if tree is None else len(tree) for tree in trees]
        places = [[place[first + n] for n in range(size)] for first, size in zip(rows.offsets, sizes, strict=True)]
        return self._decoder.forward(rows.batch, [rows.logit_rows[at] for at in order]), places

    def _descend(
        self,
        active: list[tuple[int, int]],
        logits: Tensor,
        places: list[list[int]],
        entries: Seq[PlanEntry],
        trees: Seq[TokenTree | None],
        accepted: list[Acceptance],
    ) -> list[tuple[int, int]]:
        """Sample every sequence's current node; returns those whose token is in their tree, one level down."""
        sampling: list[tuple[int, int]] = []
        rows, wanted, at = [], [], []
        for i, node in active:
            seq, path = entries[i].seq, accepted[i].tokens
            depth = len(path)
            try:
                row = seq.sampling.row(len(seq.tokens) + depth, path, seq.n_output + depth)
            except Exception as error:
                accepted[i].fault = StageError.of(error, "sampling")
                continue
            sampling.append((i, node))
            rows.append(row)
            wanted.append(seq.request.output.logprobs)
            at.append(places[i][node])
        if not rows:
            return []
        side_by_side = at == list(range(at[0], at[0] + len(at)))
        picked = logits[at[0] : at[0] + len(at)] if side_by_side else logits[at]
        following = []
        for (i, node), sampled in zip(sampling, self._sample(picked, rows, wanted), strict=True):
            tree, found = trees[i], accepted[i]
            if isinstance(sampled, StageError):
                found.fault = sampled
                continue
            token, logprob = sampled
            if token == NO_TOKEN:
                found.broken = True
                continue
            found.tokens.append(token)
            if logprob is not None:
                found.logprobs.append(logprob)
            child = tree.child(node, token) if tree is not None else None
            if child is not None:
                found.nodes.append(child)
                following.append((i, child))
        return following

    def _sample(
        self, logits: Tensor, rows: Seq[RowSampling], wanted: Seq[int | None]
    ) -> list[tuple[int, TokenLogprobs | None] | StageError]:
        """Sample all rows; if that raises, each row by itself."""
        try:
            return [*self._sampler.sample(logits, rows, wanted)]
        except Exception as error:
            if len(rows) == 1:
                return [StageError.of(error, "sampling")]
            return [self._sample(logits[r : r + 1], rows[r : r + 1], wanted[r : r + 1])[0] for r in range(len(rows))]

    def _move(self, entries: Seq[PlanEntry], accepted: Seq[Acceptance]) -> None:
        """Move accepted KV from slot root + node to slot root + depth, for all sequences in one call."""
        source, target = [], []
        for entry, acceptance in zip(entries, accepted, strict=True):
            root = entry.seq.n_computed + entry.prefill
            for depth, node in enumerate(acceptance.nodes, 1):
                if node != depth:
                    source.append(_global_slot(entry.seq.pages, root + node))
                    target.append(_global_slot(entry.seq.pages, root + depth))
        if source:
            self._decoder.move_kv(np.asarray(source, np.int64), np.asarray(target, np.int64))


def _global_slot(pages: Seq[int], slot: int) -> int:
    return pages[slot // PAGE_SIZE] * PAGE_SIZE + slot % PAGE_SIZE
