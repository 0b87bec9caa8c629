"""One sequence's part in a step."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.sequence import Sequence


@dataclass(slots=True)
class PlanEntry:
    """Compute ``seq.tokens[n_computed : n_computed + chain]``; then, if ``samples``, the pending token as row
    ``chain``, the root of a tree of at most ``nodes`` draft nodes.

    Row i is written to slot ``n_computed + i``; pages for all ``rows`` are on the sequence.
    """

    seq: Sequence
    chain: int
    nodes: int
    samples: bool

    @property
    def rows(self) -> int:
        """Rows this entry may take in the forward pass."""
        return self.chain + 1 + self.nodes if self.samples else self.chain
