"""Drafts from the predicted output that came with a request."""

from __future__ import annotations

import heapq
import math
from bisect import bisect_left
from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draft.protocol import Drafter, DraftTask
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree

SEED_TOKENS = 3  # tokens that must match at a place far from the expected one
PLACES_AFTER, PLACES_BEFORE = 8, 4  # places compared on each side of the expected one; bounds the cost
MAX_MATCH_TOKENS = 24  # tokens compared backwards from a place


class PredictionIndex:
    """End positions of the tokens, and of the runs of `SEED_TOKENS` tokens, of a prediction. Grows in steps."""

    def __init__(self, tokens: Seq[int]) -> None:
        self.tokens = tokens
        self._ends: dict[int | tuple[int, ...], list[int]] = {}
        self._indexed = 0

    def grow(self, budget: int) -> int:
        """Index at most ``budget`` more tokens, and return how many they are."""
        tokens, ends = self.tokens, self._ends
        upto = min(len(tokens), self._indexed + budget)
        for position in range(self._indexed, upto):
            end = position + 1
            ends.setdefault(tokens[position], []).append(end)
            if end >= SEED_TOKENS:
                ends.setdefault(tuple(tokens[end - SEED_TOKENS : end]), []).append(end)
        grown, self._indexed = upto - self._indexed, upto
        return grown

    def find(self, recent: Seq[int], near: int) -> tuple[int, int]:
        """(place, length) of the longest match of the end of ``recent``: ``tokens[place]`` follows it.

        Matches of at least `SEED_TOKENS` are found anywhere, shorter ones in the `MAX_MATCH_TOKENS` after ``near``. Of
        equal matches the first one at or after ``near`` is taken, else the last one before. (-1, 0): none.
        """
        ends = self._ends.get(tuple(recent[-SEED_TOKENS:]), ()) if len(recent) >= SEED_TOKENS else ()
        at = bisect_left(ends, near)
        places = [*ends[at : at + PLACES_AFTER], *reversed(ends[max(0, at - PLACES_BEFORE) : at])]
        if not places and recent:
            ends = self._ends.get(recent[-1], ())
            at = bisect_left(ends, near + 1)
            places = [end for end in ends[at : at + PLACES_AFTER] if end - near <= MAX_MATCH_TOKENS]
        best = (-1, 0)
        for place in places:
            length = self._length(recent, place)
            if length > best[1]:
                best = (place, length)
        return best

    def _length(self, recent: Seq[int], place: int) -> int:
        """Number of tokens before ``place`` that equal the end of ``recent``."""
        tokens, most = self.tokens, min(place, len(recent), MAX_MATCH_TOKENS)
        length = 0
        while length < most and tokens[place - 1 - length] == recent[-1 - length]:
            length += 1
        return length


SURE_TOKENS = 4  # matching tokens after which an alignment counts as certain
MAX_PLACES = 4  # alignments followed at a time
# Chances of the three alignments after a first differing token: fitted to recorded edits, calibrated while serving
SUBSTITUTED_CHANCE, INSERTED_CHANCE, FOUND_CHANCE = 0.35, 0.25, 0.4


@dataclass(frozen=True, slots=True)
class Place:
    """An alignment: ``tokens[position]`` of the prediction may come next."""

    position: int
    run: int  # tokens before it that equal the output
    prior: float = 1.0  # upper bound of the chance that the alignment is right


class PredictionCursor:
    """Places in the prediction at which the output may continue, likeliest first.

    While tokens match there is one place. A differing token leaves three: after the token that it may replace, at the
    token before which it may be inserted, and after its next occurrence in the prediction, if what lies between was
    deleted. They stay until the output agrees with one of them, or until its last tokens match elsewhere: the longest
    match, then the nearest one. A heading before the predicted text, or first tokens that are split differently, are
    handled as insertions and substitutions.
    """

    def __init__(self, index: PredictionIndex) -> None:
        self.index = index
        self.places = [Place(0, 0)]
        self._anchor = 0  # position at which the output left the prediction
        self._gap = 0  # output tokens since then
        self.n_output = 0  # output tokens so far
        self._recent: deque[int] = deque(maxlen=MAX_MATCH_TOKENS)

    def advance(self, token: int) -> None:
        """Append ``token`` to the output."""
        tokens = self.index.tokens
        first = self.places[0] if self.places else Place(len(tokens), 0)
        self._recent.append(token)
        self.n_output += 1
        if first.run >= SURE_TOKENS and first.position < len(tokens) and tokens[first.position] == token:
            self.places = [Place(first.position + 1, first.run + 1)]
            return
        if first.run >= SURE_TOKENS:
            self._anchor, self._gap = first.position, 0
        self._gap += 1
        kept = [
            Place(place.position + 1, place.run + 1)
            for place in self.places
            if place.position < len(tokens) and tokens[place.position] == token
        ]
        place, length = self.index.find(list(self._recent), self._anchor)
        if length and all(place != old.position for old in kept):
            kept.append(Place(place, length, FOUND_CHANCE if length == 1 else 1.0))
        kept.sort(key=lambda place: -place.run)
        # A single matching token may be a coincidence.
        if not kept or kept[0].run < 2:
            kept += self._edits([place.position for place in kept])
        self.places = kept[:MAX_PLACES]

    def _edits(self, taken: Seq[int]) -> list[Place]:
        edits = (
            Place(self._anchor + self._gap, 0, SUBSTITUTED_CHANCE / self._gap),
            Place(self._anchor, 0, INSERTED_CHANCE / self._gap**0.5),
        )
        return [edit for edit in edits if edit.position not in taken and edit.position < len(self.index.tokens)]


INDEXED_PER_STEP = 2048  # tokens of all predictions: long ones must not delay the step


class PredictionDrafter(Drafter):
    """Proposes the next tokens of the predicted output; after an edit, those at each possible place."""

    name = "prediction"

    def __init__(self) -> None:
        self._cursors: dict[Sequence, PredictionCursor] = {}

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request has a prediction."""
        return bool(sequence.request.prediction_ids)

    def begin(self, sequence: Sequence) -> None:
        request = sequence.request
        # The samples of a request share its index.
        shared = (cursor.index for other, cursor in self._cursors.items() if other.request is request)
        index = next(shared, None) or PredictionIndex(request.prediction_ids)
        self._cursors[sequence] = PredictionCursor(index)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        found, budget = [], INDEXED_PER_STEP
        for sequence in sequences:
            cursor = self._cursors[sequence]
            budget -= cursor.index.grow(budget)
            for token in sequence.tokens[sequence.n_prompt + cursor.n_output :]:
                cursor.advance(token)
            ended = all(place.position >= len(cursor.index.tokens) for place in cursor.places)
            found.append(Match.NONE if ended else Match.STRONG)
        return found

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        cursor = self._cursors[task.sequence]
        _grow(task, tree, cursor.index.tokens, cursor.places)

    def end(self, sequence: Sequence) -> None:
        self._cursors.pop(sequence, None)


def _grow(task: DraftTask, tree: TokenTree, prediction: Seq[int], places: Seq[Place]) -> None:
    """Add a chain from each of ``places``, the likeliest node of all chains first."""
    # (minus score, order, parent, position, run, prob): `order` breaks ties.
    heads: list[tuple[float, int, int, int, int, float]] = []
    for place in places:
        if place.position < len(prediction):
            prob = place.prior * _trust(place.run)
            heads.append((-math.log(prob), len(heads), 0, place.position, place.run, prob))
    heapq.heapify(heads)
    children: dict[int, list[int]] = {}  # tokens proposed at each node: chains share their common prefix
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
    """Chance that the output continues as predicted after ``run`` matching tokens: Laplace's rule with one success."""
    return (run + 2) / (run + 3)
