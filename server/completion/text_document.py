"""The server's copy of a document that an editor changes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specdec.errors import ViolationCollector

MAX_CHARACTERS = 1 << 21
BEFORE, BEHIND = 1 << 17, 1 << 15  # characters around a place that are looked at
BEFORE_STEP = 1 << 14


class OffsetUnit(StrEnum):
    """What offsets count: Unicode code points, 16-bit units as JavaScript and Java have them, or bytes."""

    CODE_POINT = "code_point"
    UTF16 = "utf16"
    UTF8 = "utf8"


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Puts ``text`` in the place of what lies between two offsets."""

    start: int
    end: int
    text: str


class TextDocument:
    """``text`` as of ``version``; ``language`` as editors name it."""

    __slots__ = ("language", "text", "version")

    def __init__(self, text: str, version: int, language: str = "") -> None:
        self.text, self.version, self.language = text, version, language

    def apply(self, edits: Sequence[TextEdit], version: int, unit: OffsetUnit, field: str = "edits") -> None:
        """Change the text by each edit in turn, all or none.

        Raises:
            InvalidRequestError: an edit lies outside of the text, or it would grow too long.
        """
        text, seen = self.text, ViolationCollector()
        for i, edit in enumerate(edits):
            start, end = (place_of(text, offset, unit) for offset in (edit.start, edit.end))
            ok = start is not None and end is not None and start <= end
            seen.check(ok, f"{field}[{i}]", "start and end must lie in the text, in order, between characters")
            seen.raise_if_any()
            assert start is not None
            assert end is not None
            text = text[:start] + edit.text + text[end:]
        check_length(text, field, seen)
        seen.raise_if_any()
        self.text, self.version = text, version

    def around(self, place: int) -> tuple[str, str]:
        """What stands before and behind an index. Of a long text it is as much as can matter, with a begin that stays
        while the place moves on."""
        start = max(0, place - BEFORE) // BEFORE_STEP * BEFORE_STEP
        return self.text[start:place], self.text[place : place + BEHIND]


def check_length(text: str, field: str, seen: ViolationCollector) -> None:
    """Tell ``seen`` of a text that is too long to be kept."""
    seen.check(len(text) <= MAX_CHARACTERS, field, f"a document may have {MAX_CHARACTERS} characters, got {len(text)}")


def place_of(text: str, offset: int, unit: OffsetUnit) -> int | None:
    """``offset`` as an index; None where there is no such place, or it is inside of a character."""
    if unit is OffsetUnit.CODE_POINT or text.isascii():
        return offset if 0 <= offset <= len(text) else None
    encoding, width = ("utf-16-le", 2) if unit is OffsetUnit.UTF16 else ("utf-8", 1)
    data = text.encode(encoding, "surrogatepass")
    if not 0 <= offset * width <= len(data):
        return None
    try:
        return len(data[: offset * width].decode(encoding))
    except UnicodeDecodeError:
        return None
