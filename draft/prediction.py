"""Drafts from the predicted output that came with a request."""

from __future__ import annotations

import heapq
import math
from collections.abc import Sequence as Seq

from draft.prediction_cursor import Place, PredictionCursor
from draft.protocol import DraftTask
from specdec.sequence import Sequence
from specdec.tree import TokenTree

CATCH_UP = 4096  # tokens of a prediction indexed per step: a long one must not hold up the others


class PredictionDrafter:
    """Proposes what the prediction says next; after an edit, what it says at each place the edit may lead to.

    A sequence whose request has no prediction is none of its business.
    """

    name = "prediction"
    costly = False

    def __init__(self) -> None:
        self._cursors: dict[int, PredictionCursor] = {}
        self._read: dict[int, int] = {}  # tokens of the sequence its cursor has seen

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request has a prediction."""
        return bool(sequence.request.prediction_ids)

    def begin(self, sequence: Sequence) -> None:
        """Start at the front of the prediction."""
        self._cursors[id(sequence)] = PredictionCursor(sequence.request.prediction_ids)
        self._read[id(sequence)] = sequence.n_prompt

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Follow the committed tokens, then continue from every place still open."""
        trees = []
        for task in tasks:
            tokens = task.sequence.tokens
            tree = TokenTree(tokens[-1])
            trees.append(tree)
            cursor = self._cursors[id(task.sequence)]
            cursor.index.grow(CATCH_UP)
            for position in range(self._read[id(task.sequence)], len(tokens)):
                cursor.advance(tokens[position])
            self._read[id(task.sequence)] = len(tokens)
            if task.max_nodes > 0 and task.max_depth > 0:
                _grow(task, tree, cursor.index.tokens, cursor.places)
        return trees

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Nothing to do: the tokens stay."""

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._cursors.pop(id(sequence), None)
        self._read.pop(id(sequence), None)


def _grow(task: DraftTask, tree: TokenTree, prediction: Seq[int], places: Seq[Place]) -> None:
    """One chain from each of ``places``; the likeliest node of all of them comes next."""
    # (minus score, order, parent, position, run, prob): `order` settles equal scores.
    heads: list[tuple[float, int, int, int, int, float]] = []
    for place in places:
        if place.position < len(prediction):
            prob = place.prior * _trust(place.run)
            heads.append((-math.log(prob), len(heads), 0, place.position, place.run, prob))
    heapq.heapify(heads)
    children: dict[int, list[int]] = {}  # of each node, the tokens proposed there: chains part where they differ
    while heads:
        _, order, parent, position, run, prob = heapq.heappop(heads)
        token, siblings = prediction[position], children.setdefault(parent, [])
        if token not in siblings:
            siblings.append(token)
        rank = siblings.index(token)
        if rank >= task.width:
            continue
        node = task.add(tree, parent, token, prob, rank)
        if node > 0 and position + 1 < len(prediction):
            prob = _trust(run + 1)
            heapq.heappush(heads, (-tree.scores[node] - math.log(prob), order, node, position + 1, run + 1, prob))


def _trust(run: int) -> float:
    """The chance that the output goes on as predicted after ``run`` tokens that did (Laplace's rule, with one
    success granted to begin with)."""
    return (run + 2) / (run + 3)
