"""Which replica a simulated request goes to: Envoy's choice in a fleet."""

from __future__ import annotations

import math
import random
from bisect import bisect_left
from collections.abc import Sequence as Seq
from hashlib import blake2b

from cluster.config import BALANCE_PERCENT, RING_PLACES

CHOICES = 2  # replicas that Envoy's LEAST_REQUEST compares


class BoundedRing:
    """Consistent hashing with bounded loads (Mirrokni et al. 1608.01350): a session has one home replica, and an order
    of others for when the home has more than its share. Requests without a session go to the less busy of two random
    replicas (Mitzenmacher 2001)."""

    def __init__(self, replicas: int, seed: int) -> None:
        places = math.ceil(RING_PLACES / replicas)
        ring = [(_hash(f"replica {replica} {n}"), replica) for replica in range(replicas) for n in range(places)]
        ring.sort()
        self._points, self._owners = [point for point, _ in ring], [owner for _, owner in ring]
        self._rng = random.Random(seed)

    def choose(self, key: str, active: Seq[int]) -> int:
        """Returns the first replica in the session's order with room, or the least busy one.

        key: of the session; empty: none. active: running requests of each replica.
        """
        if not key:
            return self._less_busy(active)
        point, count = _hash(key), len(active)
        home = self._owners[bisect_left(self._points, point) % len(self._points)]
        total = ((sum(active) + 1) * BALANCE_PERCENT + 99) // 100
        slots = max(1, math.ceil(total / count))
        if active[home] <= slots:
            return home
        order = random.Random(point).sample(range(count), count)
        return next((other for other in order if active[other] <= slots), min(order, key=active.__getitem__))

    def _less_busy(self, active: Seq[int]) -> int:
        count = len(active)
        if count <= CHOICES:
            return min(range(count), key=active.__getitem__)
        first = int(self._rng.random() * count)
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        return first if active[first] <= active[second] else second


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")
