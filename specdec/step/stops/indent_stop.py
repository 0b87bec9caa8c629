"""Ends a text before a line that stands further left than its block."""

from __future__ import annotations

from specdec.step.stops.blank_run import BlankRun
from specdec.types import FinishReason


class IndentStop:
    """Ends it before the blank lines that lead to a line with fewer than ``indent`` characters of white space. The line
    that the text begins in is none of them."""

    reason = FinishReason.INDENT

    def __init__(self, indent: int) -> None:
        self._indent = indent
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """Line breaks are kept until it is known what follows."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Look at the first visible character of each line."""
        run = self._run
        start, indent = run.start, run.indent
        run.feed(char)
        return start if start is not None and run.start is None and indent < self._indent else None

    def end(self) -> int | None:
        """Blank lines at the end are no dedent."""
        return None
