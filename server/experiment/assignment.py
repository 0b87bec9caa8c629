"""Who or what gets which arm: by the bucket of a key, by blocks of time, or in an order that favours none."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping
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


def balanced_order(salt: str, what: str, number: int) -> int:
    """0 or 1, drawn for every second number; the number after it gets the other one."""
    return (digest(salt, f"{what}/{number // 2}")[0] & 1) ^ (number & 1)


class TimeBlocks:
    """A switchback's blocks of ``block_s`` seconds each. ``arm_of`` gives the arm of a block's number: known beforehand
    to who has the salt, to nobody else, and the same after a restart. What comes in within ``washout_s`` of a block's
    begin meets what the block before has left running, and is not analysed."""

    def __init__(self, block_s: float, washout_s: float, arm_of: Callable[[int], str]) -> None:
        self.arm_of = arm_of
        self._block_s, self._washout_s = block_s, washout_s

    def at(self, seconds: float) -> int:
        """The block of a moment."""
        return int(seconds // self._block_s)

    def begin_of(self, block: int) -> float:
        """When a block begins."""
        return block * self._block_s

    def is_washed_out(self, seconds: float, settled_s: float = 0.0) -> bool:
        """Whether what comes in then is not analysed; ``settled_s``: when the block's engine was ready."""
        return seconds - max(self.begin_of(self.at(seconds)), settled_s) < self._washout_s


def random_arms(salt: str, arms: Iterable[str]) -> Callable[[int], str]:
    """Each block's arm by the bucket of ``block:NUMBER``, each with the same chance."""
    split = Split(dict.fromkeys(arms, 1.0))

    def arm_of(block: int) -> str:
        arm = split.arm(bucket(salt, f"block:{block}"))
        assert arm is not None  # every bucket is somebody's
        return arm

    return arm_of


def paired_arms(salt: str, control: str, treatment: str) -> Callable[[int], str]:
    """Blocks in pairs, one of either arm, in an order that is drawn for each pair."""
    arms = (control, treatment)
    return lambda block: arms[balanced_order(salt, "blocks", block)]
