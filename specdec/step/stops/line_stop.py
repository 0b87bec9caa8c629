"""Ends a text after so many lines."""

from __future__ import annotations

from specdec.types import FinishReason


class LineStop:
    """Ends it before the line break of line ``lines``.

    What the text begins with is the rest of a line: where that is blank it is not counted, unless ``count_blank``.
    """

    def __init__(
        self, lines: int, *, count_blank: bool = False, reason: FinishReason = FinishReason.LINES, start: int = 0
    ) -> None:
        self.reason = reason
        self._left, self._at = lines, start
        self._counts = count_blank

    @property
    def safe(self) -> int:
        """All of it: a line break is decided on at once."""
        return self._at

    def feed(self, char: str) -> int | None:
        """Count line breaks."""
        at, self._at = self._at, self._at + 1
        if char == "\n":
            if self._counts:
                self._left -= 1
                if self._left == 0:
                    return at
            self._counts = True
        elif not char.isspace():
            self._counts = True
        return None

    def end(self) -> int | None:
        """Nothing is held back."""
        return None
