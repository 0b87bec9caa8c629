"""Ends a text before a blank line."""

from __future__ import annotations

from specdec.step.stops.blank_run import BlankRun
from specdec.types import FinishReason


class BlankLineStop:
    """Ends it at the line break in front of a line without visible characters; what is left of the line that the text
    begins in is no blank line."""

    reason = FinishReason.BLANK_LINE

    def __init__(self) -> None:
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """A line break is kept until it is known what follows."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Look for a second line break in a row."""
        self._run.feed(char)
        return self._run.start if self._run.breaks == 2 else None

    def end(self) -> int | None:
        """White space behind the last line break may be the begin of a line."""
        return None
