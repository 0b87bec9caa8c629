"""Where the last line that shows something ends, while the lines behind it are blank so far."""

from __future__ import annotations


class BlankRun:
    """Follows a text. ``start``: the line break behind the last visible character, once there is one, until the next
    visible character; for a text that begins with blank lines, their first line break. ``breaks``: line breaks since
    then, itself among them. ``indent``: characters of white space since the last of them."""

    __slots__ = ("at", "breaks", "indent", "start")

    def __init__(self) -> None:
        self.at = 0
        self.start: int | None = None
        self.breaks = self.indent = 0

    @property
    def safe(self) -> int:
        """Everything before the run."""
        return self.at if self.start is None else self.start

    def feed(self, char: str) -> None:
        """Take the next character."""
        if char == "\n":
            if self.start is None:
                self.start, self.breaks = self.at, 0
            self.breaks += 1
            self.indent = 0
        elif char.isspace():
            self.indent += 1
        else:
            self.start, self.breaks = None, 0
        self.at += 1
