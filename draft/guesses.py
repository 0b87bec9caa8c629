"""Guesses of a draft model's next choices, whose rows a forward computes beside the level that it is run for."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.core.sequence import Sequence

CONTEXTS = 1 << 16  # of two tokens and of one, in a table of fixed size; a new one replaces what has its place
LONGEST_TEXT = 1024  # last tokens of a text that are read at first
MOST = 2  # guesses of a forward; a third was right too seldom to pay
FIRST_RATE = 0.3  # share of first guesses that are right, before observations
RATE_WEIGHT = 0.02  # of one guess in that share


class NextTokens:
    """What followed the last two tokens, or the last one, most recently.

    It reads the sequences' texts and the draft's own choices, right or wrong. Sequences of another salt see none of it.
    """

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        """Share of first guesses that were the draft's choice."""
        self._table: list[tuple[tuple[object, ...], int] | None] = [None] * CONTEXTS
        self._read: dict[Sequence, int] = {}  # tokens read of each sequence

    def read(self, sequence: Sequence) -> None:
        """Read the tokens of ``sequence`` that were added since the last call."""
        tokens = sequence.tokens
        for at in range(self._read.get(sequence, max(2, len(tokens) - LONGEST_TEXT)), len(tokens)):
            self.add(sequence.salt, tokens[at - 2], tokens[at - 1], tokens[at])
        self._read[sequence] = len(tokens)

    def end(self, sequence: Sequence) -> None:
        """Forget how far ``sequence`` was read."""
        self._read.pop(sequence, None)

    def add(self, salt: str, before: int, last: int, token: int) -> None:
        """``token`` follows ``last``, which follows ``before``."""
        for context in ((salt, before, last), (salt, last)):
            self._table[hash(context) % CONTEXTS] = (context, token)

    def guess(self, salt: str, before: int, last: int) -> list[int]:
        """At most `MOST` tokens that may follow ``before`` and ``last``."""
        found: list[int] = []
        while len(found) < MOST:
            for context in ((salt, before, last), (salt, last)):
                entry = self._table[hash(context) % CONTEXTS]
                if entry is not None and entry[0] == context:
                    break
            else:
                break
            before, last = last, entry[1]
            found.append(last)
        return found

    def observe(self, guessed: Seq[int], chosen: int) -> None:
        """Record what the draft chose where ``guessed`` was the guess."""
        if guessed:
            self.rate += RATE_WEIGHT * ((guessed[0] == chosen) - self.rate)
