"""How the sampling kernels cut a row: a function of the vocabulary alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

_TILE = 1024  # listed tokens looked at together
_SHORT_TILE = 256


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """A row is ``splits`` x ``groups`` x ``group`` tokens, the last split padded; one program scans a split.

    ``segments``: ``splits``, padded to a power of two. Results do not depend on a plan.
    """

    SIZES: ClassVar[tuple[tuple[int, int, int], ...]] = ((64, 4, 16), (64, 64, 16), (64, 64, 64))

    vocab: int
    groups: int
    group: int
    segments: int

    @staticmethod
    def of(vocab: int) -> SamplingPlan:
        """The plan for a vocabulary: the first of SIZES (groups, group, segments) that holds it.

        Raises:
            ValueError: ``vocab`` is not within 1 to 2^18 (more and a row's weight could pass 2^63).
        """
        most = max(groups * group * segments for groups, group, segments in SamplingPlan.SIZES)
        if not 1 <= vocab <= most:
            raise ValueError(f"logits: {vocab} columns; must be within 1 to {most}")
        size = next(size for size in SamplingPlan.SIZES if size[0] * size[1] * size[2] >= vocab)
        return SamplingPlan(vocab, *size)

    @property
    def tokens(self) -> int:
        """Tokens of a split."""
        return self.groups * self.group

    @property
    def splits(self) -> int:
        """Programs that scan a row."""
        return -(-self.vocab // self.tokens)

    def columns(self, short: bool) -> int:
        """Entries of each split's list that are looked at together; ``short``: of lists of a token or two."""
        return (_SHORT_TILE if short else _TILE) // self.segments
