"""Which replica a request goes to: the ways of Envoy that a fleet may be set to."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence as Seq
from hashlib import blake2b
from typing import Protocol

from cluster.config import BALANCE_PERCENT, RING_PLACES

ROUND_ROBIN, LEAST_REQUESTS, RING_HASH = "round-robin", "least-requests", "ring-hash"
POLICIES = (ROUND_ROBIN, LEAST_REQUESTS, RING_HASH)

CHOICES = 2  # as Envoy's LEAST_REQUEST looks at


class Router(Protocol):
    """Chooses by who asks and by how busy each replica is."""

    def choose(self, key: str, active: Seq[int]) -> int:
        """A replica. key: who asks, empty for nobody in particular. active: requests that each replica has."""


class RoundRobin:
    """One after the other."""

    def __init__(self) -> None:
        self._next = -1

    def choose(self, key: str, active: Seq[int]) -> int:
        """The next one."""
        self._next = (self._next + 1) % len(active)
        return self._next


class LeastRequests:
    """Of two replicas drawn at random the one with fewer requests (Mitzenmacher 2001)."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def choose(self, key: str, active: Seq[int]) -> int:
        """The less busy of those looked at."""
        count = len(active)
        if count <= CHOICES:
            return min(range(count), key=active.__getitem__)
        first = int(self._rng.random() * count)
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        return first if active[first] <= active[second] else second


class BoundedRing:
    """Consistent hashing in which no replica that has more than its share of the load is given more (Mirrokni et al.
    1608.01350); who asks first goes to the same replica each time, and beyond it to others in an order of its own. Who
    is nobody in particular goes by `LeastRequests`.
    """

    def __init__(self, replicas: int, seed: int) -> None:
        places = math.ceil(RING_PLACES / replicas)
        ring = [(_hash(f"replica {replica} {n}"), replica) for replica in range(replicas) for n in range(places)]
        ring.sort()
        self._points, self._owners = [point for point, _ in ring], [owner for _, owner in ring]
        self._others = LeastRequests(seed)

    def choose(self, key: str, active: Seq[int]) -> int:
        """The first in its order that has room, or the least loaded for its share where none has."""
        if not key:
            return self._others.choose(key, active)
        point, count = _hash(key), len(active)
        home = self._owners[bisect_left(self._points, point) % len(self._points)]
        total = ((sum(active) + 1) * BALANCE_PERCENT + 99) // 100
        slots = max(1, math.ceil(total / count))
        if active[home] <= slots:
            return home
        order = random.Random(point).sample(range(count), count)
        return next((other for other in order if active[other] <= slots), min(order, key=active.__getitem__))


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


def make_router(policy: str, replicas: int, seed: int) -> Router:
    """One of `POLICIES`; raises ValueError for another name."""
    if policy == ROUND_ROBIN:
        return RoundRobin()
    if policy == LEAST_REQUESTS:
        return LeastRequests(seed)
    if policy == RING_HASH:
        return BoundedRing(replicas, seed)
    raise ValueError(f"{policy}: no such policy; there are {', '.join(POLICIES)}")
