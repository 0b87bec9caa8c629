"""Which brackets a text may close that did not open them."""

from __future__ import annotations

import re
from collections.abc import Iterator

from specdec.step.stops.bracket_stop import CLOSERS, CLOSING
from specdec.step.stops.code_reader import CodeReader

BEFORE, BEHIND = 2000, 1000  # characters looked at on either side of the gap
_TELLING = re.compile(r"[()\[\]{}'\"`#/\\\n]")


def open_brackets(prefix: str, suffix: str) -> tuple[str, str]:
    """What may be closed between ``prefix`` and ``suffix``, innermost first, and what `CodeReader` calls the place: the
    brackets that are open behind the one and that nothing in the other closes.

    An editor that closes brackets by itself leaves none of them; where one was only opened, its partner is missing.
    """
    start = max(0, len(prefix) - BEFORE)
    start = prefix.find("\n", start - 1) + 1 if start else 0
    reader, needed = CodeReader(), list[str]()
    for char in _code(prefix[start:], reader):
        if char in CLOSERS:
            needed.insert(0, CLOSERS[char])
        elif char in needed:
            del needed[: needed.index(char) + 1]
    missing: list[str] = []
    behind = suffix[:BEHIND]
    # Where no partner follows, what is written will close the string.
    string = reader.quote if reader.quote in (behind if len(reader.quote) == 3 else behind.split("\n", 1)[0]) else ""
    for char in _unopened(behind, "#" if reader.quote == "#" else string):
        if char in needed:
            at = needed.index(char)
            missing += needed[:at]
            del needed[: at + 1]
    if len(suffix) <= BEHIND:
        missing += needed
    return "".join(missing), reader.quote


def _unopened(text: str, quote: str) -> Iterator[str]:
    opened: list[str] = []
    for char in _code(text, CodeReader(quote)):
        if char in CLOSERS:
            opened.append(CLOSERS[char])
        elif char in opened:
            while opened.pop() != char:
                pass
        else:
            yield char


def _code(text: str, reader: CodeReader) -> Iterator[str]:
    """The brackets of ``text`` that are code. ``reader`` is only told what can matter to it."""
    end = 0
    for match in _TELLING.finditer(text):
        if match.start() > end:
            reader.feed(" ")
        end = match.end()
        char = match[0]
        if reader.feed(char) and (char in CLOSERS or char in CLOSING):
            yield char
    if end < len(text):
        reader.feed(" ")
