"""Aligns an output with its prediction, token by token."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from draft.prediction_index import LONGEST, PredictionIndex

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
