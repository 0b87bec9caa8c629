"""Which arm a key gets: the same in every process and every language, without anything to remember."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping
from hashlib import blake2b
from itertools import accumulate

BUCKETS = 10_000


def digest(salt: str, key: str) -> bytes:
    """Eight bytes that tell ``key`` from others without telling what it is: BLAKE2b of salt, a zero byte and key, both
    in UTF-8; lone surrogates as they are."""
    text = salt.encode("utf-8", "surrogatepass") + b"\0" + key.encode("utf-8", "surrogatepass")
    return blake2b(text, digest_size=8).digest()


def bucket(salt: str, key: str) -> int:
    """0..9999, evenly: the digest as a big-endian number, modulo 10,000. Equal salt and key give equal buckets."""
    return int.from_bytes(digest(salt, key)) % BUCKETS


class Split:
    """Ranges of buckets by weight, in the arms' order; ``share`` of the buckets in all, the rest have no arm.

    With ``share`` 1 and equal weights of two arms, buckets 0..4999 are the first arm's. A larger share moves nobody who
    has an arm out of the experiment, though some into the other arm.
    """

    def __init__(self, weights: Mapping[str, float], share: float = 1.0) -> None:
        total = sum(weights.values())
        self._arms = (*weights, None)
        self._ends = [round(part / total * share * BUCKETS) for part in accumulate(weights.values())]

    def arm(self, number: int) -> str | None:
        """The arm of a bucket; None: it takes no part."""
        return self._arms[bisect_right(self._ends, number)]
