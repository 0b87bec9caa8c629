"""How many replicas there should be: a pure decision from the load that they tell, and its face to Ray Serve.

Up as soon as calls have had to wait in two looks in a row; down to the most that were needed in the last minutes, so
that a load that comes and goes does not start and stop replicas with it. Ray pickles this module into its controller,
so it needs nothing but the standard library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_LOG = logging.getLogger("ray.serve")
MOST_GROWTH = 2.0  # at one decision: what waits while replicas start says little about how many are missing
CLEARED_PERIODS = 12  # in which a queue is gone by itself: then there are enough replicas, however long it is
FULL = 0.8  # of a replica's batch: as full as those that are left may be once one is taken away


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """What a replica that serves tells. ``waiting``: requests that its engine has said nothing of. ``wait_s``: until a
    request that came now would begin. ``busy``: running requests, as a part of its largest batch."""

    waiting: float
    wait_s: float
    busy: float


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """As `cluster.config.AutoscalingConfig` has it, with the bounds of the release."""

    low: int
    high: int
    target_waiting: float
    target_wait_s: float
    period_s: float
    up_after_s: float
    down_after_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """What a decision takes from those before it. ``looked_s``: when the load was looked at last; ``over_since_s``:
    since when it has been above the target, None while it is not; ``needed``: pairs of a time and how many were needed
    then, of the last ``down_after_s``; ``waiting``: requests at the last look, of all replicas. Times are in seconds of
    any one clock."""

    looked_s: float = -math.inf
    over_since_s: float | None = None
    needed: tuple[tuple[float, int], ...] = ()
    waiting: float = 0.0


def pressure(loads: Sequence[ReplicaLoad], rule: ScalingRule) -> float:
    """The load as a part of what it may be in the mean: above 1, calls wait for too long."""
    if not loads:
        return 0.0
    waiting = sum(load.waiting for load in loads) / len(loads)
    wait_s = sum(load.wait_s for load in loads) / len(loads)
    return max(waiting / rule.target_waiting, wait_s / rule.target_wait_s)


def replicas_needed(loads: Sequence[ReplicaLoad], rule: ScalingRule) -> int:
    """How many replicas this load takes, as well as that can be told from it: where it is too high, at most
    `MOST_GROWTH` times as many as bear it now; where it is not, so many that none is fuller than `FULL`."""
    over = pressure(loads, rule)
    if over > 1:
        return math.ceil(len(loads) * min(over, MOST_GROWTH))
    return max(math.ceil(len(loads) * over), math.ceil(sum(load.busy for load in loads) / FULL))


def decide(
    now_s: float, loads: Sequence[ReplicaLoad], target: int, rule: ScalingRule, memory: Memory
) -> tuple[int, Memory]:
    """The number of replicas to have, and what to hand to the next decision.

    loads: of the replicas that serve. target: how many there are to be by the decision before. Between two looks
    nothing changes, and replicas that were asked for and are not there yet are waited for before more are, for
    ``down_after_s`` at most.
    """
    target = min(max(target, rule.low), rule.high)
    if now_s - memory.looked_s < rule.period_s or not loads:
        return target, memory
    waiting = sum(load.waiting for load in loads)
    over = pressure(loads, rule) > 1
    since_s = (now_s if memory.over_since_s is None else memory.over_since_s) if over else None
    needed = min(max(replicas_needed(loads, rule), rule.low), rule.high)
    kept = tuple((at_s, count) for at_s, count in memory.needed if now_s - at_s <= rule.down_after_s)
    if not memory.needed:
        kept = ((now_s, target),)  # what was there to begin with had its reasons
    clearing = (memory.waiting - waiting) * CLEARED_PERIODS >= waiting
    found = Memory(now_s, since_s, (*kept, (now_s, max(needed, target) if over else needed)), waiting)
    if since_s is None:
        return min(target, max(count for _, count in found.needed)), found
    over_s = now_s - since_s
    complete = len(loads) >= target or over_s >= rule.down_after_s
    if not complete or clearing or needed <= target or over_s < rule.up_after_s:
        return target, found
    return needed, replace(found, over_since_s=None)


class ServePolicy:
    """The policy that Ray Serve asks, which keeps no state but what Serve hands back to it."""

    def __init__(self, **rule: Any) -> None:
        self._rule = ScalingRule(**rule)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """How many replicas to have, of a `ray.serve.config.AutoscalingContext`."""
        memory = context.policy_state.get("memory", Memory())
        loads, now_s = self._loads(context), context.current_time
        target, found = decide(now_s, loads, context.target_num_replicas, self._rule, memory)
        if target != context.target_num_replicas:
            _LOG.info(
                "%s: %d replicas instead of %d: %.2f of the load that they may have, %d of them serve",
                context.app_name, target, context.target_num_replicas, pressure(loads, self._rule), len(loads),
            )  # fmt: skip
        return target, {"memory": found}

    def _loads(self, context: Any) -> list[ReplicaLoad]:
        """The last word of every running replica that is not too old."""
        found, now_s = [], context.current_time
        raw = context.raw_metrics or {}
        for replica, series in raw.get("waiting", {}).items():
            if series and now_s - series[-1].timestamp <= 3 * self._rule.period_s:
                wait_s, busy = (raw[name][replica][-1].value for name in ("wait_s", "busy"))
                found.append(ReplicaLoad(series[-1].value, wait_s, busy))
        return found
