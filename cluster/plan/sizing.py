"""The number of replicas that meets an objective, and the report of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from specdec.load.figures import QUANTILES, spread_cells
from specdec.load.request import Objective, Record

SIMULATED = ("ttft", "tpot", "e2e")  # metrics of objectives


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``share`` of the requests sent meet all ``objectives``: with one objective, 0.99 is its p99; with
    several, goodput. Their metrics are of `SIMULATED`."""

    objectives: tuple[Objective, ...]
    share: float = 0.99

    def kept_by(self, record: Record) -> bool:
        """Whether a request meets the objectives."""
        return record.ok and all(limit.kept_by(record) for limit in self.objectives)

    def share_in(self, run: FleetRun) -> float:
        """The share of requests that meet the objectives."""
        return fmean(self.kept_by(record) for record in run.records) if run.records else 1.0


def counted_replicas(number: int) -> str:
    """The number with its noun, for a message."""
    return "1 replica" if number == 1 else f"{number} replicas"


def least_replicas(
    plan: FleetPlan,
    requests: Sequence[PlannedRequest],
    goal: Goal,
    most: int,
    say: Callable[[str], None] = lambda _: None,
) -> FleetRun | None:
    """Returns the run of the fewest replicas that meet ``goal``; None: ``most`` replicas do not. ``plan``: the fleet;
    its number of replicas is ignored. say: receives each number's result.

    Doubles, then bisects: assumes that more replicas never do worse. Runs stop as soon as the goal is missed.
    """

    may_miss = len(requests) * (1 - goal.share) + 1e-9

    def enough(replicas: int) -> FleetRun | None:
        kept = ended = 0

        def is_missed(record: Record) -> bool:
            nonlocal kept, ended
            ended += 1
            kept += goal.kept_by(record)
            return ended - kept > may_miss

        run = simulate(replace(plan, replicas=replicas), requests, is_missed)
        verdict, which = ("enough", "all") if run.whole else ("too few", "the first")
        say(f"{counted_replicas(replicas)}: {verdict}, {kept / ended:.2%} of {which} {ended} requests meet it")
        return run if run.whole else None

    most = max(1, min(most, len(requests)))  # more than one per request cannot help
    too_few, replicas, found = 0, 1, enough(1)
    while found is None:
        if replicas == most:
            return None
        too_few, replicas = replicas, min(2 * replicas, most)
        found = enough(replicas)
    while replicas - too_few > 1:
        middle = (too_few + replicas) // 2
        run = enough(middle)
        if run is None:
            too_few = middle
        else:
            replicas, found = middle, run
    return found


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The figures of a plan."""

    run: FleetRun
    goal: Goal | None
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        profile = self.run.plan.profile
        return {
            "target": profile.target, "machine": profile.machine, "tokens_per_step": round(profile.tokens_per_step, 3),
            "goal": self._goal(), **self.run.as_dict(), "wall_s": round(self.wall_s, 2),
        }  # fmt: skip

    def _goal(self) -> dict[str, Any] | None:
        if self.goal is None:
            return None
        limits, share = [str(limit) for limit in self.goal.objectives], self.goal.share
        kept = self.goal.share_in(self.run)
        return {"objectives": limits, "share": share, "kept_by": round(kept, 4), "enough": kept >= share}

    def tables(self) -> Iterator[tuple[Sequence[str], list[Sequence[str]]]]:
        """Heads and rows of each."""
        figures = self.as_dict()
        yield ("figure", "value"), list(self._answer(figures))
        columns = ("n", "mean", *(f"p{q}" for q in QUANTILES), "max")
        latency = figures["latency"].items()
        yield ("ms", *columns), [(name.removesuffix("_ms"), *spread_cells(found, columns)) for name, found in latency]

    def _answer(self, figures: dict[str, Any]) -> Iterator[tuple[str, str]]:
        goal, requests, rates = figures["goal"], figures["requests"], figures["throughput"]
        yield "replicas", str(figures["replicas"])
        if goal is not None:
            kept = f"{goal['kept_by']:.2%} of requests sent, {goal['share']:.2%} wanted"
            yield "within " + ", ".join(f"{limit} ms" for limit in goal["objectives"]), kept
        yield "requests", ", ".join(f"{count} {name}" for name, count in requests.items() if count)
        yield "requests/s, output tokens/s", f"{rates['requests_per_s']:.2f}, {rates['output_tokens_per_s']:.1f}"
        yield "prefix hits", f"{figures['prefix_hit_rate']:.1%}"
        yield "requests of the busiest replica over the mean", f"{figures['max_over_mean_requests']:.2f}"
        yield "tokens per step", f"{figures['tokens_per_step']:.2f}"
        yield "simulated in", f"{figures['wall_s']:.1f} s, {figures['steps']} steps"
