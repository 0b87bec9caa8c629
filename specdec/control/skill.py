"""How well a drafter does on one text."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.control.ratio import Ratio


def _ratio() -> Ratio:
    return Ratio(prior=5.0, least=0.25, most=1.7)


@dataclass(slots=True)
class Skill:
    """How much better or worse a drafter does on this text than on texts in general: in finding the next token
    (``first``), and in going on where it was right (``deep``). Text that repeats in places is hard to enter and easy
    to follow."""

    first: Ratio = field(default_factory=_ratio)
    deep: Ratio = field(default_factory=_ratio)

    def factor(self, first: bool) -> float:
        """What a calibrated chance is to be multiplied by, of a first or of a deeper token."""
        return (self.first if first else self.deep).value
