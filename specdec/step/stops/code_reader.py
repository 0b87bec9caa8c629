"""Tells code from strings and comments, one character at a time, in whatever language it is."""

from __future__ import annotations

_MARKS = "'\"`"
_LONG = ("'''", '"""')
_ONE_LINE = ("'", '"')
QUOTES = ("", *_MARKS, *_LONG, "#")


class CodeReader:
    """``quote`` says what the text is in: "" code, a quotation mark, three of them, or ``#`` a comment (``//`` too).

    Knows no language, so it errs; what lies between two marks on a line is taken for a string though it may be code
    (lifetimes, apostrophes), a comment for one though it may be a division. Who asks should make nothing of what is
    quoted.
    """

    __slots__ = ("_escaped", "_last", "_run", "quote")

    def __init__(self, quote: str = "") -> None:
        self.quote = quote
        self._last, self._run = "", 0  # the last character, and how often it came in a row
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Take the next character; whether it is code."""
        self._run = self._run + 1 if char == self._last else 1
        self._last = char
        if not self.quote:
            return self._open(char)
        self._close(char)
        return False

    def _open(self, char: str) -> bool:
        if char in _MARKS:
            # Two marks were an empty string, and the third makes them one mark that opens a long one.
            self.quote = char * 3 if self._run == 3 and char != "`" else char
        elif char == "#" or (char == "/" and self._run == 2):
            self.quote = "#"
        else:
            return True
        self._run = 0 if len(self.quote) == 3 else self._run
        return False

    def _close(self, char: str) -> None:
        if self._escaped:
            self._escaped, self._run = False, 0
        elif char == "\\" and self.quote != "#":
            self._escaped = True
        elif char == (self.quote if self.quote != "#" else "\n") or (char == "\n" and self.quote in _ONE_LINE):
            self.quote = ""
        elif len(self.quote) == 3 and char == self.quote[0] and self._run == 3:
            self.quote, self._run = "", 0
