"""Ends a text where it begins to repeat what follows it in the file."""

from __future__ import annotations

from specdec.step.stops.bracket_stop import CLOSERS, CLOSING
from specdec.step.stops.suffix_anchor import SuffixAnchor
from specdec.types import FinishReason


class SuffixStop:
    """Looks for the anchor of ``suffix`` (`SuffixAnchor`) by the automaton of Knuth, Morris and Pratt 1977.

    ``lead`` is the white space in front of the text, which a repetition may take along. A repetition that closes
    brackets which the text opened before it is none: ``foo(x)`` in front of ``)`` is whole. At the text's end a
    beginning of the anchor is enough where it is no chance.
    """

    reason = FinishReason.SUFFIX

    def __init__(self, suffix: str, lead: str = "") -> None:
        self._anchor = SuffixAnchor.of(suffix)
        self._falls = _falls(self._anchor.text)
        self._matched = 0  # characters of the anchor that end the text so far
        self._depths = [0]  # of brackets, before each character and at the end
        self._at = -len(lead)
        for char in lead:
            self._advance(char)

    @property
    def safe(self) -> int:
        """What may turn out to be a repetition is kept."""
        return max(0, self._at - self._matched)

    def feed(self, char: str) -> int | None:
        """Look for the whole anchor."""
        self._advance(char)
        anchor = self._anchor.text
        if not anchor or self._matched < len(anchor):
            return None
        found = self._repeats(len(anchor))
        place = max(0, self._at - len(anchor))
        self._matched = self._falls[-1]
        return place if found else None

    def end(self) -> int | None:
        """Look for the longest beginning of the anchor."""
        length = self._matched
        while length:
            if self._anchor.told_by(length) and self._repeats(length):
                return max(0, self._at - length)
            length = self._falls[length - 1]
        return None

    def _advance(self, char: str) -> None:
        depth = self._depths[-1]
        self._depths.append(depth + (char in CLOSERS) - (char in CLOSING))
        self._at += 1
        anchor, matched = self._anchor.text, self._matched
        while matched and (matched == len(anchor) or anchor[matched] != char):
            matched = self._falls[matched - 1]
        self._matched = matched + 1 if anchor and anchor[matched] == char else 0

    def _repeats(self, length: int) -> bool:
        """Whether the last ``length`` characters, which begin the anchor, are no part of what the text has to say."""
        depths = self._depths[-1 - length :]
        outside = depths[0] <= 0
        return outside if self._anchor.trail else outside or min(depths) >= depths[0]


def _falls(pattern: str) -> list[int]:
    """For each beginning of ``pattern``, the length of its longest proper end that begins ``pattern`` too."""
    falls, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = falls[length - 1]
        length += pattern[i] == pattern[length]
        falls[i] = length
    return falls
