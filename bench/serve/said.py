"""What an answer said, for comparing it with another one."""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b

from bench.serve.record import Record

_BYTES = 16


class Said:
    """Gathers texts, and token ids where the server tells them. ``tells_ids``: whether it did, be there none."""

    def __init__(self) -> None:
        self._texts: list[str] = []
        self._ids: list[int] = []
        self.tells_ids = False

    def text(self, part: str) -> None:
        """More text."""
        self._texts.append(part)

    def ids(self, part: Iterable[int]) -> None:
        """More tokens."""
        self.tells_ids = True
        self._ids += part

    def note(self, record: Record) -> None:
        """Put the hashes into ``record``."""
        record.text_hash = _digest("".join(self._texts))
        if self.tells_ids:
            record.token_hash = _digest(",".join(map(str, self._ids)))


def _digest(text: str) -> bytes:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=_BYTES).digest()
