"""What the characters of positions count."""

from __future__ import annotations

from enum import StrEnum


class PositionEncoding(StrEnum):
    """As editors and servers agree on it at the begin: bytes, 16-bit units, or code points."""

    UTF8 = "utf-8"
    UTF16 = "utf-16"
    UTF32 = "utf-32"

    def place_in(self, text: str, units: int) -> int:
        """The index in ``text`` that lies ``units`` behind its begin; beyond the end it is the end, inside of a
        character that character's begin. ``text`` holds no lone surrogates."""
        units = max(0, units)
        if self is PositionEncoding.UTF32 or text.isascii():
            return min(units, len(text))
        codec, width = ("utf-8", 1) if self is PositionEncoding.UTF8 else ("utf-16-le", 2)
        return len(text.encode(codec)[: units * width].decode(codec, "ignore"))
