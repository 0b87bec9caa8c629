"""What two prompts have in common, without what they say."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Sequence
from hashlib import blake2b

BLOCK = 64
_BYTES = 8


class BlockHashes:
    """Keyed hashes that nobody can look texts up in: the key is drawn here, and goes with the process."""

    def __init__(self) -> None:
        self._key = secrets.token_bytes(32)

    def of_prompt(self, ids: Sequence[int]) -> list[bytes]:
        """One per whole block of `BLOCK` tokens. Each depends on all blocks before it, so prompts have as many of them
        in common as whole blocks from their beginning."""
        found: list[bytes] = []
        before = b""
        data = array("q", ids).tobytes()
        step = BLOCK * array("q").itemsize
        for start in range(0, len(data) - step + 1, step):
            before = blake2b(before + data[start : start + step], key=self._key, digest_size=_BYTES).digest()
            found.append(before)
        return found

    def of_name(self, name: str) -> bytes:
        """Of who asks; nothing for nobody."""
        text = name.encode("utf-8", "surrogatepass")
        return blake2b(text, key=self._key, person=b"name", digest_size=_BYTES).digest() if name else b""
