"""Lets an output begin with a given text, however its tokens spell that text and what follows it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.grammar.token_spelling import TokenSpelling


class HealedStart:
    """A `TokenGrammar` for the first tokens only: those that spell ``start``, the last of which may go on beyond it.

    A prompt's text may end within what is one token with what follows it: "ret" in front of "urn". Its tokens would
    then be ones the model never saw in such a place. So the prompt ends before that word, and the output spells it
    again: the choice falls among the tokens that do (token healing).
    """

    error = ""
    finished = False

    def __init__(self, spelling: TokenSpelling, start: str) -> None:
        self._spelling, self._rest = spelling, start.encode()
        self._masks: dict[bytes | None, NDArray[np.uint32]] = {}

    @property
    def done(self) -> bool:
        """Whether the text is spelled, so that anything may follow."""
        return not self._rest

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``; none after one that spells something else."""
        rest = self._after(path)
        found = self._masks.get(rest)
        if found is None:
            found = self._spelling.mask(rest or b"")
            self._masks[rest] = found = found if rest is not None else np.zeros_like(found)
        return found

    def commit(self, tokens: Iterable[int]) -> None:
        """Move ``tokens`` into the base state."""
        self._rest = self._after(tokens) or b""

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """Nothing for certain: a text can be spelled in several ways."""
        return []

    def _after(self, path: Iterable[int]) -> bytes | None:
        """What is still to be spelled behind ``path``; None where that is impossible."""
        rest = self._rest
        for token in path:
            if not rest:
                break
            data = self._spelling.bytes_of(token)
            if data and rest.startswith(data):
                rest = rest[len(data) :]
            elif data.startswith(rest):
                rest = b""
            else:
                return None
        return rest
