"""The sizes that a step's arrays are padded to."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StepTier:
    """entries: sequences; rows: of the forward; samples: rows whose logits are wanted, 0 for none; pages: page ids per
    sequence. Launches, and so graphs, are a function of these."""

    entries: int
    rows: int
    samples: int
    pages: int
