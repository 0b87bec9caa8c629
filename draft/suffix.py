"""Drafts from the request's own text: what followed the longest suffix seen before."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

from draft.protocol import DraftTask
from draft.suffix_automaton import SuffixAutomaton
from specdec.sequence import Sequence
from specdec.tree import TokenTree

MIN_MATCH = 2  # shorter contexts guess too badly to be worth a row
CATCH_UP = 4096  # prompt tokens indexed per step: a long prompt must not hold up the others


class _Text:
    __slots__ = ("automaton", "indexed")

    def __init__(self) -> None:
        self.automaton = SuffixAutomaton()
        self.indexed = 0


class SuffixDrafter:
    """Best-first continuation of the longest repeated suffix, by counts.

    A child's score is log(its share of its parent's continuations), scaled by a trust that grows with the length
    of the match: a context of two tokens recurs by chance, one of twenty does not.
    """

    name = "suffix"

    def __init__(self) -> None:
        self._texts: dict[int, _Text] = {}

    def begin(self, sequence: Sequence) -> None:
        """Start an index; it is filled while the prompt is prefilled."""
        self._texts[id(sequence)] = _Text()

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Index what is new and continue each sequence's longest repeated suffix."""
        return [self._one(task) for task in tasks]

    def _one(self, task: DraftTask) -> TokenTree:
        tokens = task.sequence.tokens
        tree = TokenTree(tokens[-1])
        text = self._texts[id(task.sequence)]
        upto = min(len(tokens), text.indexed + CATCH_UP)
        for token in tokens[text.indexed : upto]:
            text.automaton.extend(token)
        text.indexed = upto
        if task.max_nodes > 0 and upto == len(tokens):
            _expand(text.automaton, task, tree)
        return tree

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Nothing to do: the index holds tokens, not KV."""

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._texts.pop(id(sequence), None)


def _expand(automaton: SuffixAutomaton, task: DraftTask, tree: TokenTree) -> None:
    start = automaton.match(MIN_MATCH)
    if start == 0:
        return
    length = automaton.lengths[start]
    trust = math.log(length / (length + 1.0))
    # (cost, order, parent node, token, state): `order` settles equal costs, so the tree is the same every time.
    heap: list[tuple[float, int, int, int, int]] = []
    order = 0

    def push_children(state: int, node: int, score: float) -> None:
        nonlocal order
        edges, counts = automaton.edges[state], automaton.counts
        if not edges or tree.depths[node] >= task.max_depth:
            return
        total = sum(counts[s] for s in edges.values()) or 1
        for token, target in sorted(edges.items(), key=lambda e: -counts[e[1]])[: task.width]:
            share = max(counts[target], 1) / max(total, 1)
            heapq.heappush(heap, (-(score + trust + math.log(min(share, 1.0))), order, node, token, target))
            order += 1

    push_children(start, 0, 0.0)
    while heap and len(tree) <= task.max_nodes:
        cost, _, parent, token, state = heapq.heappop(heap)
        node = tree.add(parent, token, -cost, SuffixDrafter.name)
        push_children(state, node, -cost)
