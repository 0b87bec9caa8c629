"""Assignment of arms by bucket of a key."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate

BUCKETS = 10_000


def digest(salt: str, key: str) -> bytes:
    """A keyed digest of 8 bytes: BLAKE2b of salt, a zero byte and key, both in UTF-8 (lone surrogates kept)."""
    text = salt.encode("utf-8", "surrogatepass") + b"\0" + key.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()


def bucket(salt: str, key: str) -> int:
    """The bucket of a key, uniform over 0..9999: the digest as a big-endian number, modulo 10,000."""
    return int.from_bytes(digest(salt, key)) % BUCKETS


class Split:
    """Ranges of buckets by weight, in the arms' order. They cover ``share`` of the buckets; the rest has no arm.

    With ``share`` 1 and equal weights of two arms, buckets 0..4999 belong to the first arm. A larger share keeps every
    assigned key in the experiment, but may move it to the other arm.
    """

    def __init__(self, weights: Mapping[str, float], share: float = 1.0) -> None:
        total = sum(weights.values())
        self._arms = (*weights, None)
        self._ends = [round(part / total * share * BUCKETS) for part in accumulate(weights.values())]

    def arm(self, number: int) -> str | None:
        """The arm of a bucket; None: the bucket does not participate."""
        return self._arms[bisect_right(self._ends, number)]
