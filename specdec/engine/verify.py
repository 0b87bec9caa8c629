"""Verify: one target forward over prompts and trees, acceptance down each tree, and the accepted rows' KV moved."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
from torch import Tensor

from specdec.core.sampling import Sampler
from specdec.core.tree import TokenTree
from specdec.core.types import TokenLogprobs
from specdec.engine.scheduler import PlanEntry
from specdec.models.decoder import HostDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import NO_TOKEN


@dataclass(slots=True)
class Acceptance:
    """What one sequence's tree came to: the nodes accepted, and the tokens emitted (one more than nodes).

    ``broken``: a row held no usable logit, so it ends there and the request can not go on.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    broken: bool = False


@dataclass(frozen=True, slots=True)
class StepRows:
    """The rows of one forward. logit_rows: those of all tree nodes. offsets: where in these each entry's tree begins;
    first_rows: where in the batch each entry does; roots: its row that is the tree's root, -1 where it has none."""

    batch: ForwardBatch
    logit_rows: list[int]
    offsets: list[int]
    first_rows: list[int]
    roots: list[int]

    @staticmethod
    def of(entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> StepRows:
        """Rows of ``entries``, of which those without a tree only compute their prefill chunks."""
        batch_entries: list[BatchEntry] = []
        logit_rows: list[int] = []
        offsets: list[int] = []
        first_rows: list[int] = []
        roots: list[int] = []
        row = 0
        for entry, tree in zip(entries, trees, strict=True):
            seq, prefill = entry.seq, entry.prefill
            tokens = seq.tokens[seq.n_computed : seq.n_computed + prefill]
            parents = list(range(-1, prefill - 1))
            offsets.append(len(logit_rows))
            first_rows.append(row)
            roots.append(-1 if tree is None else prefill)
            if tree is not None:
                tokens += tree.tokens
                parents += [prefill - 1, *(prefill + parent for parent in tree.parents[1:])]
                logit_rows += range(row + prefill, row + prefill + len(tree))
            row += len(tokens)
            batch_entries.append(BatchEntry(tokens, parents, seq.n_computed, seq.pages))
        return StepRows(ForwardBatch.build(batch_entries), logit_rows, offsets, first_rows, roots)


class StepVerifier(Protocol):
    """`Verifier` (`specdec.engine.verify`) on a CPU, `DeviceVerifier` (`specdec.engine.device_verify`) on a GPU: the
    same tokens for the same logits."""

    @property
    def keeps_aux_states(self) -> bool:
        """Whether the target keeps auxiliary hidden states for a feature head."""

    def features(self, index: int, prefill: int, acceptance: Acceptance, count: int) -> Tensor:
        """Hidden states of the last run's entry ``index``, prompt rows, root, accepted path: the first ``count``
        of its ``prefill + 1 + len(acceptance.nodes)`` rows, float32 [count, layers * hidden] in CPU memory."""

    @property
    def overlaps(self) -> bool:
        """Whether there is time between the return of `start` and the result, for work that does not need it."""

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """Forward all rows, accept down all trees, move the accepted KV. What is returned waits until that is done and
        gives one `Acceptance` per entry; it is to be called before the next `start`."""


class Verifier:
    """Runs the target on a step's rows and decides what each sequence emits.

    At a node the target's own choice x is sampled exactly as plain decode would; acceptance goes on in the
    child that holds x and stops where there is none. The tree decides how many tokens a step yields, never which.
    """

    def __init__(self, decoder: HostDecoder, sampler: Sampler) -> None:
        self._decoder, self._sampler = decoder, sampler
        self._first_rows: list[int] = []  # of the last forward's entries

    overlaps = False

    @property
    def keeps_aux_states(self) -> bool:
        """Whether the target keeps auxiliary hidden states for a feature head."""
        return bool(self._decoder.aux_layers)

    def features(self, index: int, prefill: int, acceptance: Acceptance, count: int) -> Tensor:
        """Hidden states of the last run's entry ``index``, prompt rows, root, accepted path: the first ``count``
        of its ``prefill + 1 + len(acceptance.nodes)`` rows, float32 [count, layers * hidden]."""
        first = self._first_rows[index]
        rows = [*range(first, first + prefill + 1), *(first + prefill + node for node in acceptance.nodes)]
        return self._decoder.aux_hidden_states[rows[:count]]

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """Forward all rows, accept level by level, move the accepted KV: all is done on return."""
        logits, offsets = self._forward(entries, trees)
        accepted = [Acceptance() for _ in entries]
        active = [(i, 0) for i, tree in enumerate(trees) if tree is not None]
        while active:
            active = self._descend(active, logits, offsets, entries, trees, accepted)
        self._move(entries, accepted)
        return lambda: accepted

    def _forward(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> tuple[Tensor, list[int]]:
        """Logits of every tree node, and where each entry's begin."""
        rows = StepRows.of(entries, trees)
        self._first_rows = rows.first_rows
        return self._decoder.forward(rows.batch, rows.logit_rows), rows.offsets

    def _descend(
        self,
        active: list[tuple[int, int]],
        logits: Tensor,
        offsets: list[int],
        entries: Seq[PlanEntry],
        trees: Seq[TokenTree | None],
        accepted: list[Acceptance],
    ) -> list[tuple[int, int]]:
        """Sample every sequence's current node; returns those whose choice is in their tree, one level down."""
        rows, wanted, at = [], [], []
        for i, node in active:
            seq, path = entries[i].seq, accepted[i].tokens
            depth = len(path)
            rows.append(seq.sampling.row(len(seq.tokens) + depth, path, seq.n_output + depth))
            wanted.append(seq.request.output.logprobs)
            at.append(offsets[i] + node)
        picked = logits[at[0] : at[0] + 1] if len(at) == 1 else logits[at]  # a lone sequence is not copied
        sampled = self._sampler.sample(picked, rows, wanted)
        following = []
        for (i, node), token, logprob in zip(active, sampled.tokens, sampled.logprobs, strict=True):
            tree, found = trees[i], accepted[i]
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

    def _move(self, entries: Seq[PlanEntry], accepted: Seq[Acceptance]) -> None:
        """Bring accepted KV from slot root + node to slot root + depth, for all sequences in one call."""
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
