"""A text that an editor changes by lines and characters."""

from __future__ import annotations

import re
from bisect import bisect_right

from server.lsp.position_encoding import PositionEncoding

_LINE_END = re.compile(r"\r\n|\n|\r")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SyncedText:
    """``text``, and where its lines begin. Lines end as LSP says: at ``\\n``, ``\\r\\n`` or ``\\r``. Half a surrogate
    pair, which no other side could be told of, is kept as U+FFFD, which counts as much."""

    def __init__(self, text: str, encoding: PositionEncoding) -> None:
        self.text, self._encoding = whole_characters(text), encoding
        self._starts = [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    def place(self, line: int, character: int) -> int:
        """The index of a position. One behind its line's last character is the line's end, one behind the last line
        the text's."""
        if line >= len(self._starts):
            return len(self.text)
        start = self._starts[max(0, line)]
        end = self._starts[line + 1] if line + 1 < len(self._starts) else len(self.text)
        shown = self.text[start:end].rstrip("\r\n")
        return start + self._encoding.place_in(shown, character)

    def replace(self, start: int, end: int, text: str) -> None:
        """Put ``text`` into the place of what lies between two indices."""
        starts = self._starts
        # Lines are found anew from the one before, whose end may be half of what is now one line end.
        first = max(0, bisect_right(starts, start) - 2)
        last = bisect_right(starts, end)
        new = whole_characters(text)
        grown = len(new) - (end - start)
        self.text = self.text[:start] + new + self.text[end:]
        stop = starts[last] + grown if last < len(starts) else len(self.text)
        begun = starts[first]
        found = [m.end() for m in _LINE_END.finditer(self.text, begun, stop)]
        starts[first + 1 :] = [*found, *(place + grown for place in starts[last + 1 :])]


def whole_characters(text: str) -> str:
    """``text`` with half surrogate pairs replaced."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)
