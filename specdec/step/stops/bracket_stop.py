"""Ends a text before a closing bracket that it did not open."""

from __future__ import annotations

from specdec.step.stops.blank_run import BlankRun
from specdec.step.stops.code_reader import CodeReader
from specdec.types import FinishReason

CLOSERS = {"(": ")", "[": "]", "{": "}"}
CLOSING = frozenset(CLOSERS.values())


class BracketStop:
    """``closers``: what it may close though it did not open it, in order. ``quote``: what it begins in the middle of,
    as `CodeReader` calls it.

    Brackets in strings and comments don't count. Those opened where only seems to be a string are remembered: the rule
    rather misses an end than cuts a text that is whole.
    """

    reason = FinishReason.BRACKET

    def __init__(self, closers: str = "", quote: str = "") -> None:
        self._open: list[str] = []  # what would close the brackets opened, innermost last
        self._allowed = list(closers)
        self._quoted: list[str] = []  # the same for those opened in strings and comments
        self._reader = CodeReader(quote)
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """A line break is kept until it is known whether a bracket follows it."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Follow the brackets; one that begins its line takes the line break in front of it along."""
        start, at = self._run.start, self._run.at
        self._run.feed(char)
        is_code = self._reader.feed(char)
        if char in CLOSERS:
            (self._open if is_code else self._quoted).append(CLOSERS[char])
        elif is_code and char in CLOSING and not self._close(char):
            return at if start is None else start
        return None

    def end(self) -> int | None:
        """Line breaks at the end stay."""
        return None

    def _close(self, char: str) -> bool:
        """Whether ``char`` closes something it may close; what was left open inside is closed along."""
        if char in self._open:
            while self._open.pop() != char:
                pass
        elif char in self._quoted:
            self._quoted.remove(char)
        elif self._allowed and self._allowed[0] == char:
            del self._allowed[0]
        else:
            return False
        return True
