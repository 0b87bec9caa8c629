"""A simulated fleet: replicas behind Envoy's choice of a replica (`BoundedRing`), driven by one event queue."""

from __future__ import annotations

import gc
import heapq
import math
import random
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import count
from typing import Any

from cluster.config import BALANCE_PERCENT, RING_PLACES
from cluster.plan.arrivals import PlannedRequest
from cluster.plan.drafts import DraftLaw
from cluster.plan.profile import Profile
from cluster.plan.replica import Outcome, Replica
from server.errors import DeadlinePassedError
from specdec.core.types import Delta, Started
from specdec.errors import RequestError
from specdec.load.figures import spread, throughput
from specdec.load.request import Record


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

    def choose(self, key: str, active: Sequence[int]) -> int:
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

    def _less_busy(self, active: Sequence[int]) -> int:
        count = len(active)
        first = int(self._rng.random() * count)
        second = (first + 1 + int(self._rng.random() * (count - 1))) % count
        return first if active[first] <= active[second] else second


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest(), "big")


@dataclass(frozen=True, slots=True)
class FleetPlan:
    """A fleet of equal replicas behind a router."""

    profile: Profile
    replicas: int
    seed: int = 0  # of all random numbers


@dataclass(slots=True)
class FleetRun:
    """The result of a simulation."""

    plan: FleetPlan
    records: list[Record] = field(default_factory=list)  # of every request sent, by arrival
    by_replica: list[int] = field(default_factory=list)  # requests sent to each replica
    steps: int = 0  # engine steps of all replicas
    ended_s: float = 0.0  # end of the last answer
    whole: bool = True  # False: stopped early

    @property
    def answered(self) -> list[Record]:
        """The records of completed requests."""
        return [record for record in self.records if record.ok]

    @property
    def prefix_hit_rate(self) -> float:
        """Share of all prompt tokens that came from a prefix cache."""
        prompts = sum(record.prompt_tokens for record in self.records)
        return sum(record.cached_tokens for record in self.records) / prompts if prompts else 0.0

    @property
    def imbalance(self) -> float:
        """Requests of the busiest replica over the mean."""
        return max(self.by_replica) * len(self.by_replica) / max(1, sum(self.by_replica))

    def as_dict(self) -> dict[str, Any]:
        """JSON-able figures, of the same names as `bench serve` has them."""
        answered = self.answered
        return {
            "replicas": self.plan.replicas, "duration_s": round(self.ended_s, 3),
            "requests": {"sent": len(self.records)} | dict(Counter(record.outcome for record in self.records)),
            "errors": dict(Counter(record.error for record in self.records if not record.ok).most_common(5)),
            "latency": {
                "ttft_ms": spread([record.ttft_ms for record in answered]),
                "tpot_ms": spread([tpot for record in answered if (tpot := record.tpot_ms) is not None]),
                "e2e_ms": spread([record.e2e_ms for record in answered]),
            },
            "throughput": throughput(answered, max(self.ended_s, 1e-9)),
            "prefix_hit_rate": round(self.prefix_hit_rate, 4), "max_over_mean_requests": round(self.imbalance, 3),
            "steps": self.steps,
        }  # fmt: skip


Late = Callable[[Record], bool]


class Fleet:
    """One run of requests through a fleet. ``hopeless``: called with each ended request; True stops the run.

    Arrivals are open-loop. A replica steps while it has work, and takes in new requests at the end of each step, as the
    engine's process does. Simultaneous events are handled in order of creation, so a plan has one result.
    """

    def __init__(self, plan: FleetPlan, hopeless: Late | None = None) -> None:
        profile = plan.profile
        law = DraftLaw(profile.drafted)
        self._hopeless = hopeless
        self._router = BoundedRing(plan.replicas, plan.seed)
        self._replicas = [Replica(profile, law, plan.seed * 1_000_003 + number) for number in range(plan.replicas)]
        self._active = [0] * plan.replicas
        self._lead_s = profile.overheads.request_ms / 1e3
        self._stepping: list[tuple[float, int, int]] = []  # (when a step ends, order, replica)
        self._idle = [True] * plan.replicas
        self._order = count()
        self._records: dict[str, tuple[Record, int]] = {}
        self._run = FleetRun(plan, by_replica=[0] * plan.replicas)

    def run(self, requests: Sequence[PlannedRequest]) -> FleetRun:
        """Runs ``requests``, sorted by arrival, to their end."""
        for number, planned in enumerate(requests):
            at_s = planned.at_s + self._lead_s
            if not self._until(at_s):
                return self._run
            self._send(number, planned, at_s)
        self._until(float("inf"))
        return self._run

    def _send(self, number: int, planned: PlannedRequest, now: float) -> None:
        at = self._router.choose(planned.session, self._active)
        record = Record(str(number), planned.at_s, planned.at_s, prompt_tokens=planned.prompt_tokens)
        run, replica = self._run, self._replicas[at]
        run.records.append(record)
        run.by_replica[at] += 1
        try:
            replica.admit(planned.request(number), now)
        except RequestError as error:
            self._end(record, error, now)
            return
        self._records[record.name] = record, at
        self._active[at] += 1
        if self._idle[at]:
            self._step(at, now)

    def _step(self, at: int, now: float) -> None:
        self._idle[at] = False
        heapq.heappush(self._stepping, (self._replicas[at].step(now), next(self._order), at))
        self._run.steps += 1

    def _until(self, until_s: float) -> bool:
        """Advances to ``until_s``; False: the run was stopped."""
        stepping = self._stepping
        while stepping and stepping[0][0] <= until_s:
            now, _, at = heapq.heappop(stepping)
            replica = self._replicas[at]
            for name, outcome in replica.outcomes(now):
                self._take(name, outcome, now)
            if not self._run.whole:
                return False
            if replica.busy:
                self._step(at, now)
            else:
                self._idle[at] = True
        return True

    def _take(self, name: str, outcome: Outcome, now: float) -> None:
        record, at = self._records[name]
        if isinstance(outcome, Delta):
            record.chunk(now)
            record.output_tokens += len(outcome.token_ids)
        elif isinstance(outcome, Started):
            record.cached_tokens = outcome.cached_tokens
        else:
            del self._records[name]
            self._active[at] -= 1
            self._end(record, outcome if isinstance(outcome, RequestError) else None, now)

    def _end(self, record: Record, error: RequestError | None, now: float) -> None:
        record.end_s = now
        if error is None or isinstance(error, DeadlinePassedError):
            self._run.ended_s = now
        if isinstance(error, DeadlinePassedError):
            record.outcome, record.error = "cut", "its deadline passed"
        elif error is not None:
            record.outcome, record.error = "refused", type(error).__name__
        if self._hopeless is not None and self._hopeless(record):
            self._run.whole = False


def simulate(plan: FleetPlan, requests: Sequence[PlannedRequest], hopeless: Late | None = None) -> FleetRun:
    """Simulates ``requests``, sorted by arrival, on the fleet of ``plan``."""
    gc.disable()  # a run creates millions of small objects and no cycles; collection would take a third of the time
    try:
        return Fleet(plan, hopeless).run(requests)
    finally:
        gc.enable()
