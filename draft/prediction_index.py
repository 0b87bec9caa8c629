"""Where the tokens of a prediction occur in it."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence as Seq

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
