"""Drafts with a small model of the target's vocabulary: level by level, by the target's own noise."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq

from torch import Tensor

from draft.catch_up import Backlog, catch_up
from draft.growth import Growth, feed, going_on
from draft.protocol import DraftTask
from specdec.models.target_decoder import TargetDecoder
from specdec.sampling import Sampler
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from verify_kernels.forward_batch import BatchEntry, ForwardBatch


class ModelDrafter:
    """Proposes the top-w of log q / T + G under the request's own filters, where G is the noise the target will
    use: a without-replacement sample ordered by the chance of holding the target's choice (Daliri et al.,
    arXiv 2408.07978). With T = 0 these are simply the w likeliest tokens.

    Its KV lies in its own pool under the shared page table: slot s of a sequence is slot s in both. Committed
    tokens that it has not seen (a prompt, an accepted run) are fed as a chain before the first level, when it is
    asked for the first time: a request that never needs it never pays for it.

    target_size: rows of the target's output table; ids beyond it, padding of a larger one, are never proposed.
    """

    name = "model"
    costly = True

    def __init__(self, decoder: TargetDecoder, sampler: Sampler, target_size: int) -> None:
        self._decoder, self._sampler, self._target_size = decoder, sampler, target_size

    def begin(self, sequence: Sequence) -> None:
        """Nothing to do: a prefix hit has set ``draft_computed`` already."""

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Nothing to do: the scheduler has reset ``draft_computed`` with the pages."""

    def end(self, sequence: Sequence) -> None:
        """Nothing to do: the pages are the scheduler's."""

    def backlog(self, sequence: Sequence) -> int:
        """Committed tokens whose KV it lacks."""
        return len(sequence.tokens) - sequence.draft_computed

    def rehearse(self, rows: int) -> None:
        """One level for ``rows`` sequences: their rows and their logits."""
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // 64))))
        self._decoder.forward(ForwardBatch.build([entry]), list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Catch up with the committed tokens, then grow every tree by levels until deeper ones do not pay."""
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        growing = [
            Growth(task, tree, len(task.sequence.tokens) - 1, task.sequence.pages, [task.sequence.tokens[-1]])
            for task, tree in zip(tasks, trees, strict=True)
            if task.max_nodes > 0 < task.max_depth and self._knows(task.sequence)
        ]
        logits = catch_up(self._decoder, [_backlog(growth.task.sequence) for growth in growing])
        while growing and logits is not None:
            growing = self._expand(growing, logits)
            growing, logits = feed(self._decoder, growing)
        return trees

    def _knows(self, sequence: Sequence) -> bool:
        """Whether it has a row for every token still to be fed: a target's table may be larger, by padding."""
        start = min(sequence.draft_computed, len(sequence.tokens) - 1)
        return max(sequence.tokens[start:]) < self._decoder.config.vocab_size

    def _expand(self, growing: Seq[Growth], logits: Tensor) -> list[Growth]:
        """Give frontier nodes their children, best first; returns the growths that can go on."""
        rows = [g.row(g.tree.path_tokens(g.anchors[node])) for g in growing for node in g.frontier]
        children = self._sampler.children(
            logits[:, : self._target_size], rows, max(growth.task.width for growth in growing)
        )
        at = 0
        for growth in growing:
            own = children[at : at + len(growth.frontier)]
            at += len(growth.frontier)
            growth.advance(self._add(growth, own))
        return going_on(growing)

    def _add(self, growth: Growth, children: Seq[Seq[tuple[int, float]]]) -> list[int]:
        """Add a level's children, the likeliest first, leaving room for deeper levels; returns the new nodes."""
        task, tree = growth.task, growth.tree
        offered = [
            (rank, tree.scores[growth.anchors[node]] + logprob, node, token, logprob)
            for node, options in zip(growth.frontier, children, strict=True)
            for rank, (token, logprob) in enumerate(options[: task.width])
        ]
        offered.sort(key=lambda o: (o[0], -o[1]))
        fresh = []
        for rank, _, node, token, logprob in offered[: growth.level_room]:
            anchor = task.add(tree, growth.anchors[node], token, math.exp(logprob), rank)
            if anchor >= 0:
                fresh.append(growth.add(node, token, anchor))
        return fresh


def _backlog(sequence: Sequence) -> Backlog:
    def reached(upto: int) -> None:
        sequence.draft_computed = upto

    tokens = sequence.tokens
    return Backlog(tokens, min(sequence.draft_computed, len(tokens) - 1), sequence.pages, reached)
