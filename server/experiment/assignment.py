"""Assignment of arms: by bucket of a key, by block of time, or in a balanced order."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
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


def balanced_order(salt: str, what: str, number: int) -> int:
    """0 or 1: random for each even number; the following odd number gets the opposite."""
    return (digest(salt, f"{what}/{number // 2}")[0] & 1) ^ (number & 1)


class TimeBlocks:
    """Blocks of a switchback, ``block_s`` seconds each. ``arm_of`` maps a block's number to its arm; it is predictable
    only with the salt, and stable across restarts. Requests within ``washout_s`` of a block's begin run beside those
    of the block before, and are not analysed."""

    def __init__(self, block_s: float, washout_s: float, arm_of: Callable[[int], str]) -> None:
        self.arm_of = arm_of
        self._block_s, self._washout_s = block_s, washout_s

    def at(self, seconds: float) -> int:
        """The block at a time."""
        return int(seconds // self._block_s)

    def begin_of(self, block: int) -> float:
        return block * self._block_s

    def is_washed_out(self, seconds: float, settled_s: float = 0.0) -> bool:
        """Whether a request at this time is not analysed. settled_s: when the engine was ready for the block."""
        return seconds - max(self.begin_of(self.at(seconds)), settled_s) < self._washout_s


def random_arms(salt: str, arms: Iterable[str]) -> Callable[[int], str]:
    """The arm of each block by the bucket of ``block:NUMBER``, with equal chances."""
    split = Split(dict.fromkeys(arms, 1.0))

    def arm_of(block: int) -> str:
        arm = split.arm(bucket(salt, f"block:{block}"))
        assert arm is not None  # share is 1
        return arm

    return arm_of
