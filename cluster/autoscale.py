"""Autoscaling: a pure decision from the replicas' load, and its adapter for Ray Serve.

The fleet grows when calls wait in two evaluations in a row. It shrinks to the largest number that was needed within
``down_after_s``, so a fluctuating load does not start and stop replicas. Ray pickles this module into its controller,
so it imports only the standard library.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

_LOG = logging.getLogger("ray.serve")
MAX_GROWTH = 2.0  # factor per decision: a queue that builds up while replicas start says little about the need
CLEARED_PERIODS = 12  # a queue that shrinks fast enough to be empty within so many periods needs no replica
MAX_FILL = 0.8  # of a replica's batch: the highest mean fill after a replica is removed


@dataclass(frozen=True, slots=True)
class ReplicaLoad:
    """The load of a ready replica."""

    waiting: float  # requests without a first event from the engine
    wait_s: float  # forecast of the seconds until a new request would begin
    busy: float  # running requests relative to the largest batch, 0 to 1


@dataclass(frozen=True, slots=True)
class ScalingRule:
    """`cluster.config.AutoscalingConfig` with the bounds of the release."""

    low: int
    high: int
    target_waiting: float
    target_wait_s: float
    period_s: float
    up_after_s: float
    down_after_s: float


@dataclass(frozen=True, slots=True)
class Memory:
    """The state between two decisions. Times are in seconds of one clock."""

    evaluated_s: float = -math.inf  # time of the last evaluation
    over_since_s: float | None = None  # since when the load is above the target; None: it is not
    needed: tuple[tuple[float, int], ...] = ()  # (time, replicas needed) within the last ``down_after_s``
    waiting: float = 0.0  # waiting requests of all replicas at the last evaluation


def pressure(loads: Sequence[ReplicaLoad], rule: ScalingRule) -> float:
    """Mean load relative to the target; above 1, calls wait too long."""
    if not loads:
        return 0.0
    waiting = sum(load.waiting for load in loads) / len(loads)
    wait_s = sum(load.wait_s for load in loads) / len(loads)
    return max(waiting / rule.target_waiting, wait_s / rule.target_wait_s)


def replicas_needed(loads: Sequence[ReplicaLoad], rule: ScalingRule) -> int:
    """Estimates how many replicas the load needs: above the target at most `MAX_GROWTH` times the present number, else
    as many as keep the mean fill below `MAX_FILL`."""
    over = pressure(loads, rule)
    if over > 1:
        return math.ceil(len(loads) * min(over, MAX_GROWTH))
    return max(math.ceil(len(loads) * over), math.ceil(sum(load.busy for load in loads) / MAX_FILL))


def decide(
    now_s: float, loads: Sequence[ReplicaLoad], target: int, rule: ScalingRule, memory: Memory
) -> tuple[int, Memory]:
    """Returns the new number of replicas, and the memory for the next decision.

    ``loads``: of the ready replicas. ``target``: the present decision. Within ``period_s`` of an evaluation nothing
    changes. Replicas that are still starting delay further growth, for at most ``down_after_s``.
    """
    target = min(max(target, rule.low), rule.high)
    if now_s < memory.evaluated_s:  # the clock was set back
        memory = Memory()
    if now_s - memory.evaluated_s < rule.period_s or not loads:
        return target, memory
    waiting = sum(load.waiting for load in loads)
    over = pressure(loads, rule) > 1
    since_s = (now_s if memory.over_since_s is None else memory.over_since_s) if over else None
    needed = min(max(replicas_needed(loads, rule), rule.low), rule.high)
    kept = tuple((at_s, count) for at_s, count in memory.needed if now_s - at_s <= rule.down_after_s)
    if not memory.needed:
        kept = ((now_s, target),)  # the initial number counts as needed
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
    """The autoscaling policy of Ray Serve; its only state is what Serve passes back."""

    def __init__(self, **rule: Any) -> None:
        self._rule = ScalingRule(**rule)

    def __call__(self, context: Any) -> tuple[int, dict[str, Any]]:
        """Returns the number of replicas and the next state, for a `ray.serve.config.AutoscalingContext`."""
        memory = context.policy_state.get("memory", Memory())
        loads, now_s = self._loads(context), context.current_time
        target, found = decide(now_s, loads, context.target_num_replicas, self._rule, memory)
        if target != context.target_num_replicas:
            _LOG.info(
                "%s: %d replicas instead of %d; load %.2f of the target, %d replicas ready",
                context.app_name, target, context.target_num_replicas, pressure(loads, self._rule), len(loads),
            )  # fmt: skip
        return target, {"memory": found}

    def _loads(self, context: Any) -> list[ReplicaLoad]:
        """The latest report of each running replica, unless it is older than three periods."""
        found, now_s = [], context.current_time
        raw = context.raw_metrics or {}
        for replica, series in raw.get("waiting", {}).items():
            if series and now_s - series[-1].timestamp <= 3 * self._rule.period_s:
                wait_s, busy = (raw[name][replica][-1].value for name in ("wait_s", "busy"))
                found.append(ReplicaLoad(series[-1].value, wait_s, busy))
        return found
