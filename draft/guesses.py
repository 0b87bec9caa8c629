"""Guesses of a draft model's next choices, whose rows a forward computes beside the level that it is run for."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from specdec.core.sequence import Sequence

TABLE_SIZE = 1 << 16  # n-grams; a new one replaces what has its place
MAX_TEXT = 1024  # tokens at a prompt's end that are read
MAX_GUESSES = 2  # of a forward; a third gained nothing
FIRST_RATE = 0.3  # share of first guesses that are right, before observations
RATE_WEIGHT = 0.02  # of one guess in that share


class NgramTable:
    """The latest follower of each bigram and of each token.

    It reads the sequences' texts and the draft's own choices, right or wrong. Sequences of another salt see none of it.
    """

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        """Share of first guesses that were the draft's choice."""
        self._table: list[tuple[tuple[object, ...], int] | None] = [None] * TABLE_SIZE
        self._n_read: dict[Sequence, int] = {}  # tokens read of each sequence

    def read(self, sequence: Sequence) -> None:
        """Read the tokens of ``sequence`` that were added since the last call."""
        tokens = sequence.tokens
        for at in range(self._n_read.get(sequence, max(2, len(tokens) - MAX_TEXT)), len(tokens)):
            self.add(sequence.salt, tokens[at - 2], tokens[at - 1], tokens[at])
        self._n_read[sequence] = len(tokens)

    def end(self, sequence: Sequence) -> None:
        """Forget how far ``sequence`` was read."""
        self._n_read.pop(sequence, None)

    def add(self, salt: str, before: int, last: int, token: int) -> None:
        """``token`` follows ``last``, which follows ``before``."""
        for ngram in ((salt, before, last), (salt, last)):
            self._table[hash(ngram) % TABLE_SIZE] = (ngram, token)

    def guess(self, salt: str, before: int, last: int) -> list[int]:
        """At most `MAX_GUESSES` tokens to follow ``before`` and ``last``; the bigram's follower before the token's."""
        found: list[int] = []
        while len(found) < MAX_GUESSES:
            for ngram in ((salt, before, last), (salt, last)):
                entry = self._table[hash(ngram) % TABLE_SIZE]
                if entry is not None and entry[0] == ngram:
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
