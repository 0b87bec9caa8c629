"""Which beginning of a suffix, when it comes out, proves that a text has gone on into what follows it."""

from __future__ import annotations

from dataclasses import dataclass

SURE = 6  # visible characters that are no chance; fewer are said often
_TRAIL = frozenset(")]}>\"'`;:, \t")


@dataclass(frozen=True, slots=True)
class SuffixAnchor:
    """``text`` begins the suffix. ``trail``: it is what stands behind the cursor on its line, nothing but closing
    brackets and marks: then it counts only where the text is as deep in brackets as at its start."""

    text: str
    trail: bool

    @staticmethod
    def of(suffix: str) -> SuffixAnchor:
        """The marks that end the cursor's line; else as many lines as hold `SURE` visible characters, or all there is.

        Empty where nothing can be told: no visible character follows.
        """
        lines = suffix.splitlines(keepends=True)
        if not suffix.strip():
            return SuffixAnchor("", False)
        if lines[0].strip() and _TRAIL.issuperset(lines[0].rstrip("\r\n")):
            return SuffixAnchor(lines[0], True)
        seen = 0
        for count, line in enumerate(lines, 1):
            seen += visible(line)
            if seen >= SURE:
                return SuffixAnchor("".join(lines[:count]), False)
        return SuffixAnchor(suffix, False)

    def told_by(self, length: int) -> bool:
        """Whether its first ``length`` characters, at a text's very end, prove it too."""
        part = self.text[:length]
        return bool(part.strip()) and (self.trail or visible(part) >= SURE or length == len(self.text))


def visible(text: str) -> int:
    """Characters that are no white space."""
    return sum(not char.isspace() for char in text)
