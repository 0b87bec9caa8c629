"""Writes a text into a store, a bounded number of tokens at a time, leaving out what the store holds."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.suffix_automaton import BREAK
from draft.suffix_cursor import SuffixCursor
from draft.text_store import TextStore

KNOWN = 32  # tokens: a run this long that the store holds is not written again
OVERLAP = 16  # known tokens written on either side of new ones, so that contexts reach across the seam


class TextWriter:
    """An editor sends the same file again and again; only what changed in it is new to the store.

    A cursor runs through the text ahead of the writing. A token is known once it lies in a match of at least
    ``KNOWN`` tokens, and can be decided on once it has left the current match, whose start never moves back. Where
    one match ends and the next begins lies a seam, which is new even if both sides are known.
    """

    def __init__(self, store: TextStore, tokens: Seq[int]) -> None:
        self._store, self._tokens = store, tokens
        self._cursor = SuffixCursor(store.young)
        self._into = store.young  # what was written to last
        self._read = 0  # tokens the cursor has seen
        self._decided = 0  # tokens before here are written or skipped: the start of the current match
        self._written = -1  # tokens before here and back to the last BREAK are written; -1: none yet
        self._known = 0  # where the last long match ended
        self._trailing = 0  # known tokens still to be written after a new one

    @property
    def remaining(self) -> int:
        """Tokens not yet read."""
        return len(self._tokens) - self._read

    def work(self, budget: int) -> int:
        """Go on for at most ``budget`` tokens; returns how many that was."""
        self._store.expire()
        done = min(self.remaining, budget)
        for _ in range(done):
            young = self._store.young
            if young is not self._cursor.automaton:
                self._cursor = SuffixCursor(young)  # a generation ended; the new one knows nothing
            self._cursor.step(self._tokens[self._read])
            length = self._cursor.length
            self._read += 1
            if length >= KNOWN:
                self._known = self._read
            # A match that reaches back less than OVERLAP leaves runs across its start that no match holds.
            self._decide(self._read - length, seam=length <= OVERLAP)
        if not self.remaining:
            self._decide(len(self._tokens), seam=False)
        return done

    def _decide(self, upto: int, seam: bool) -> None:
        while self._decided < upto:
            index = self._decided
            if index >= self._known or (seam and index == upto - 1):
                self._write(index)
                self._trailing = OVERLAP
            elif self._trailing:
                self._write(index)
                self._trailing -= 1
            self._decided += 1

    def _write(self, index: int) -> None:
        store = self._store
        store.make_room()
        if self._written != index or store.young is not self._into:
            self._into = store.young
            if self._into.size:
                store.append(BREAK)
            for i in range(max(0, index - OVERLAP), index):
                store.append(self._tokens[i])
        store.append(self._tokens[index])
        self._written = index + 1
