"""Finds where a JSON value ends that comes in pieces."""

from __future__ import annotations

import re

from server.json_body import MAX_DEPTH

_IN_STRING = re.compile(r'[^"\\]*')
_BETWEEN_BRACKETS = re.compile(r'[^"{}\[\]]*')
_SCALAR = re.compile(r'[^\s,:{}\[\]"]*')


class JsonScanner:
    """Looks at quotes and brackets only. ``over``: the value's end was there. ``is_deep``: it is nested deeper than
    bodies may be."""

    def __init__(self) -> None:
        self._depth = 0
        self._began = self._quoted = self._escaped = False
        self.over = self.is_deep = False

    def feed(self, text: str) -> int:
        """How many characters of ``text`` belong to the value."""
        at = 0
        while at < len(text) and not self.over:
            at = self._string(text, at) if self._quoted else self._plain(text, at)
        return at

    def _string(self, text: str, at: int) -> int:
        if self._escaped:
            self._escaped = False
            return at + 1
        at = _end(_IN_STRING, text, at)
        if at == len(text):
            return at
        self._escaped, self._quoted = text[at] == "\\", text[at] != '"'
        self.over = not self._quoted and not self._depth
        return at + 1

    def _plain(self, text: str, at: int) -> int:
        at = _end(_BETWEEN_BRACKETS if self._depth else _SCALAR, text, at)
        if at == len(text):
            self._began = True
            return at
        char = text[at]
        if not self._depth and (self._began or char not in '{["' or at):
            self.over = True  # a number or a word, or nothing: what follows is not part of it
            return at
        self._began = True
        if char == '"':
            self._quoted = True
        else:
            self._depth += 1 if char in "{[" else -1
            self.is_deep |= self._depth > MAX_DEPTH
            self.over = not self._depth
        return at + 1


def _end(pattern: re.Pattern[str], text: str, at: int) -> int:
    found = pattern.match(text, at)
    assert found is not None  # it matches nothing too
    return found.end()
