"""Drafts from the predicted output that came with a request."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draft.protocol import Drafter, DraftTask
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree

SEED = 3  # tokens that must match before a far place is considered
AFTER, BEFORE = 8, 4  # places looked at on either side of the expected one: bounds the cost on repetitive text
LONGEST = 24  # tokens compared backwards per place


class PredictionIndex:
    """Single tokens and runs of ``SEED`` tokens of a prediction, by their end positions. Grows in steps."""

    def __init__(self, tokens: Seq[int]) -> None:
        self.tokens = tokens
        self._ends: dict[int | tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def grow(self, budget: int) -> None:
        """Index at most ``budget`` more tokens."""
        tokens, ends = self.tokens, self._ends
        upto = min(len(tokens), self._indexed + budget)
        for position in range(self._indexed, upto):
            end = position + 1
            ends.setdefault(tokens[position], []).append(end)
            if end >= SEED:
                ends.setdefault(tuple(tokens[end - SEED : end]), []).append(end)
        self._indexed = upto

    def find(self, recent: Seq[int], near: int) -> tuple[int, int]:
        """(place, length) of the longest match of the end of ``recent``: ``tokens[place]`` would come next.

        Runs of ``SEED`` tokens are found anywhere, shorter ones in the next ``LONGEST`` tokens from ``near`` on. Of
        equal matches the first one at or after ``near`` is taken, else the last one before. (-1, 0): none.
        """
        ends = self._ends.get(tuple(recent[-SEED:]), ()) if len(recent) >= SEED else ()
        at = bisect_left(ends, near)
        places = [*ends[at : at + AFTER], *reversed(ends[max(0, at - BEFORE) : at])]
        if not places and recent:
            ends = self._ends.get(recent[-1], ())
            at = bisect_left(ends, near + 1)
            places = [end for end in ends[at : at + AFTER] if end - near <= LONGEST]
        best = (-1, 0)
        for place in places:
            length = self._length(recent, place)
            if length > best[1]:
                best = (place, length)
        return best

    def _length(self, recent: Seq[int], place: int) -> int:
        """Tokens before ``place`` that are the end of ``recent``."""
        tokens, most = self.tokens, min(place, len(recent), LONGEST)
        length = 0
        while length < most and tokens[place - 1 - length] == recent[-1 - length]:
            length += 1
        return length


SURE = 4  # matching tokens after which an alignment is taken for right
MAX_PLACES = 4
SUBSTITUTED, INSERTED, FOUND = 0.35, 0.25, 0.4  # chances of the places to go on at, after a first token that differs


@dataclass(frozen=True, slots=True)
class Place:
    """``tokens[position]`` of the prediction may come next; the ``run`` tokens before it came out. ``prior``: the
    chance, at most, that this is the right place."""

    position: int
    run: int
    prior: float = 1.0


class PredictionCursor:
    """Where in the prediction the output may go on, likeliest first.

    As long as tokens match there is one place. A token that differs leaves three: behind the token it may have
    replaced, at the token it may have been put in front of, and behind where it stands in the prediction if what
    lies between was dropped. They stay open until the output agrees with one of them, or until its last tokens are
    found elsewhere: the longest match, the nearest first. So a heading in front of the predicted text, or first
    tokens cut in another way, are insertions and replacements like any other.
    """

    def __init__(self, prediction: Seq[int]) -> None:
        self.index = PredictionIndex(prediction)
        self.places = [Place(0, 0)]
        self._anchor = 0  # the last place known to be right: where the output left the prediction
        self._gap = 0  # output tokens since then
        self._recent: deque[int] = deque(maxlen=LONGEST)

    def advance(self, token: int) -> None:
        """``token`` was committed."""
        tokens = self.index.tokens
        first = self.places[0] if self.places else Place(len(tokens), 0)
        self._recent.append(token)
        if first.run >= SURE and first.position < len(tokens) and tokens[first.position] == token:
            self.places = [Place(first.position + 1, first.run + 1)]
            return
        if first.run >= SURE:
            self._anchor, self._gap = first.position, 0
        self._gap += 1
        kept = [
            Place(place.position + 1, place.run + 1)
            for place in self.places
            if place.position < len(tokens) and tokens[place.position] == token
        ]
        place, length = self.index.find(list(self._recent), self._anchor)
        if length and all(place != old.position for old in kept):
            kept.append(Place(place, length, FOUND if length == 1 else 1.0))
        kept.sort(key=lambda place: -place.run)
        # One match may be chance: the places an edit leads to stay open beside it.
        if not kept or kept[0].run < 2:
            kept += self._edits([place.position for place in kept])
        self.places = kept[:MAX_PLACES]

    def _edits(self, taken: Seq[int]) -> list[Place]:
        edits = (
            Place(self._anchor + self._gap, 0, SUBSTITUTED / self._gap),
            Place(self._anchor, 0, INSERTED / self._gap**0.5),
        )
        return [edit for edit in edits if edit.position not in taken and edit.position < len(self.index.tokens)]


CATCH_UP = 4096  # tokens of a prediction indexed per step: a long one must not hold up the others


class PredictionDrafter(Drafter):
    """Proposes what the prediction says next; after an edit, what it says at each place the edit may lead to.

    A sequence whose request has no prediction is none of its business.
    """

    name = "prediction"

    def __init__(self) -> None:
        self._cursors: dict[Sequence, PredictionCursor] = {}
        self._read: dict[Sequence, int] = {}  # tokens of the sequence its cursor has seen

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request has a prediction."""
        return bool(sequence.request.prediction_ids)

    def begin(self, sequence: Sequence) -> None:
        """Start at the front of the prediction."""
        self._cursors[sequence] = PredictionCursor(sequence.request.prediction_ids)
        self._read[sequence] = sequence.n_prompt

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Follow the committed tokens, then continue from every place still open."""
        trees = []
        for task in tasks:
            tokens = task.sequence.tokens
            tree = TokenTree(tokens[-1])
            trees.append(tree)
            cursor = self._cursors[task.sequence]
            cursor.index.grow(CATCH_UP)
            for position in range(self._read[task.sequence], len(tokens)):
                cursor.advance(tokens[position])
            self._read[task.sequence] = len(tokens)
            if task.max_nodes > 0 and task.max_depth > 0:
                _grow(task, tree, cursor.index.tokens, cursor.places)
        return trees

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._cursors.pop(sequence, None)
        self._read.pop(sequence, None)


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
