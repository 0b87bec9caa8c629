"""What every drafter is to the engine."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

from specdec.sampling import SequenceSampling
from specdec.sequence import Sequence
from specdec.tree import TokenTree


@dataclass(frozen=True, slots=True)
class DraftTask:
    """One sequence's turn. ``max_nodes`` 0: propose nothing, but work that must keep up may be done.

    ``sequence.tokens`` are all committed; the last is the pending token, the root of the tree to fill.
    """

    sequence: Sequence
    sampling: SequenceSampling
    max_nodes: int
    max_depth: int
    width: int


class Drafter(Protocol):
    """Proposes trees. A drafter can be wrong, slow or broken; it can not change what comes out."""

    name: str

    def begin(self, sequence: Sequence) -> None:
        """A sequence enters; ``sequence.tokens`` holds its prompt."""

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """One tree per task, rooted at the pending token, at most ``max_nodes`` draft nodes."""

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """``tokens`` were committed (they are at the end of ``sequence.tokens`` already)."""

    def rewind(self, sequence: Sequence) -> None:
        """The sequence lost its KV (preemption); its tokens stay."""

    def end(self, sequence: Sequence) -> None:
        """The sequence left; forget it. Called once, also for sequences that failed."""
