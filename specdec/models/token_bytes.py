"""The raw bytes of single tokens: what incremental decoding joins, since a token may hold part of a character."""

from __future__ import annotations

import re
from typing import Any

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def byte_level_alphabet() -> dict[str, int]:
    """Character -> byte of byte-level BPE: printable Latin-1 stands for itself, other bytes for U+0100 onwards."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    alphabet = {chr(byte): byte for byte in printable}
    rest = [byte for byte in range(256) if byte not in set(printable)]
    alphabet.update((chr(0x100 + i), byte) for i, byte in enumerate(rest))
    return alphabet


class TokenBytes:
    """Maps a token's vocabulary string to its bytes, as the tokenizer's decoder would."""

    def __init__(self, decoder: dict[str, Any] | None) -> None:
        text = str(decoder)
        self._byte_level = "'ByteLevel'" in text
        self._spaces = "▁" in text or "'Metaspace'" in text
        self._byte_fallback = "'ByteFallback'" in text
        self._alphabet = byte_level_alphabet()

    def of(self, piece: str) -> bytes:
        """Bytes of the vocabulary entry ``piece`` (not of a special token, whose text is taken as it is)."""
        if self._byte_level:
            values = [self._alphabet.get(char) for char in piece]
            known = [value for value in values if value is not None]
            return bytes(known) if len(known) == len(values) else piece.encode()
        if self._byte_fallback and (match := _BYTE_TOKEN.fullmatch(piece)):
            return bytes([int(match[1], 16)])
        return (piece.replace("▁", " ") if self._spaces else piece).encode()
