"""What sampling and drafters need of a grammar; `specdec.grammar.GrammarState` is one."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray


class TokenGrammar(Protocol):
    """One sequence's place in its grammar: base state at the committed tokens, nodes by their paths above it."""

    error: str

    @property
    def finished(self) -> bool:
        """Whether nothing but an end token can follow the committed tokens."""

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``: uint32 [ceil(vocab / 32)], bit v & 31 of word v >> 5 set: v may follow."""

    def commit(self, tokens: Iterable[int]) -> None:
        """Move ``tokens`` into the base state."""

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens of the text the grammar forces after ``path``."""
