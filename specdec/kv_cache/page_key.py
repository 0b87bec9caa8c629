"""Names for the content of a full page: a hash chained over everything before it, rooted at the salt."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from hashlib import blake2b

from verify_kernels.forward_batch import PAGE_SIZE

KEY_BYTES = 16
_ROOT = b"specdec.salt"
_PAGE = b"specdec.page"

__all__ = ["KEY_BYTES", "PAGE_SIZE", "page_key", "pages_for", "root_key"]


def pages_for(n_tokens: int) -> int:
    """Pages that hold ``n_tokens`` slots."""
    return -(-n_tokens // PAGE_SIZE)


def root_key(salt: str) -> bytes:
    """What the first page of every chain under ``salt`` is chained to."""
    return blake2b(salt.encode(), digest_size=KEY_BYTES, person=_ROOT).digest()


def page_key(previous: bytes, tokens: Seq[int]) -> bytes:
    """Key of a page: 16 bytes over the key before it and its own token ids (each below 2**31)."""
    return blake2b(previous + array("i", tokens).tobytes(), digest_size=KEY_BYTES, person=_PAGE).digest()
