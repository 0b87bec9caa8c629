"""The report of a plan, as JSON and as tables."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.routing import POLICIES
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from cluster.plan.sizing import Ceiling, Goal, Prices, ceiling
from specdec.load.figures import QUANTILES


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The figures of a plan."""

    runs: tuple[FleetRun, ...]  # by routing policy, that of the plan first
    ceiling: Ceiling
    goal: Goal | None
    enough: bool | None  # whether the replicas meet the goal; None: no goal
    prices: Prices
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        run = self.runs[0]
        profile = run.plan.profile
        return {
            "target": profile.target, "machine": profile.machine, "tokens_per_step": round(profile.tokens_per_step, 3),
            "goal": self._goal(), **run.as_dict(), "ceiling": self.ceiling.as_dict(), "cost": self.prices.of(run),
            "by_policy": {
                other.plan.policy: {
                    "prefix_hit_rate": round(other.prefix_hit_rate, 4),
                    "ttft_ms": other.as_dict()["latency"]["ttft_ms"],
                    "max_over_mean_requests": round(other.imbalance, 3),
                }
                for other in self.runs
            },
            "wall_s": round(self.wall_s, 2),
        }  # fmt: skip

    def _goal(self) -> dict[str, Any] | None:
        if self.goal is None:
            return None
        limits = [str(limit) for limit in self.goal.objectives]
        kept = round(self.goal.share_in(self.runs[0]), 4)
        return {"objectives": limits, "share": self.goal.share, "kept_by": kept, "enough": bool(self.enough)}

    def tables(self) -> Iterator[Table]:
        """For a terminal."""
        figures = self.as_dict()
        yield self._answer(figures)
        latency = Table("ms", "n", "mean", *(f"p{q}" for q in QUANTILES), "max")
        for name, found in figures["latency"].items():
            cells = (f"{found[c]:.1f}" if found["n"] else "-" for c in ("mean", *(f"p{q}" for q in QUANTILES), "max"))
            latency.add_row(name.removesuffix("_ms"), str(found["n"]), *cells)
        yield latency
        policies = Table("routing", "prefix hits", "TTFT p50, ms", "TTFT p99, ms", "max over mean requests")
        for name, found in figures["by_policy"].items():
            times = found["ttft_ms"]
            quantiles = (f"{times[q]:.1f}" if times["n"] else "-" for q in ("p50", "p99"))
            policies.add_row(
                name, f"{found['prefix_hit_rate']:.1%}", *quantiles, f"{found['max_over_mean_requests']:.2f}"
            )
        yield policies

    def _answer(self, figures: dict[str, Any]) -> Table:
        table, most, goal = Table("figure", "value"), self.ceiling, figures["goal"]
        table.add_row("replicas", str(figures["replicas"]))
        if goal is not None:
            kept = f"{goal['kept_by']:.2%} of {goal['share']:.2%} of requests sent"
            table.add_row("within " + ", ".join(f"{limit} ms" for limit in goal["objectives"]), kept)
        requests = figures["requests"]
        table.add_row("requests", ", ".join(f"{count} {name}" for name, count in requests.items() if count))
        table.add_row("requests/s, output tokens/s", "{requests_per_s:.2f}, {output_tokens_per_s:.1f}".format(
            **figures["throughput"]
        ))  # fmt: skip
        table.add_row("tokens per step", f"{figures['tokens_per_step']:.2f}")
        table.add_row("sequences that fit a replica", f"{most.sequences} (its KV cache alone: {most.kv_sequences})")
        table.add_row("at most, output tokens/s a replica", (
            f"{most.with_prompts:.0f} with prompts, {most.decode:.0f} without, {most.one_stream:.0f} of one stream"
        ))  # fmt: skip
        if most.memory_decode is not None and most.memory_one_stream is not None:
            bound = f"{most.memory_decode:.0f} without prompts, {most.memory_one_stream:.0f} of one stream"
            table.add_row("by memory's bandwidth", bound)
        for name, value in (figures["cost"] or {}).items():
            table.add_row(name.replace("_", " "), f"{value:.1%}" if name == "worth_it_from" else f"{value:.4g}")
        table.add_row("simulated in", f"{figures['wall_s']:.1f} s, {figures['steps']} steps")
        return table


def by_policies(first: FleetRun, requests: Sequence[PlannedRequest]) -> tuple[FleetRun, ...]:
    """``first``, and runs of the same fleet with every other policy."""
    plan: FleetPlan = first.plan
    others = [policy for policy in POLICIES if policy != plan.policy]
    return (first, *(simulate(replace(plan, policy=policy), requests) for policy in others))


def make_report(
    run: FleetRun,
    requests: Sequence[PlannedRequest],
    goal: Goal | None,
    prices: Prices,
    wall_s: float,
    *,
    compare: bool,
) -> PlanReport:
    """Reports ``run``. compare: simulates the other policies too, if there are several replicas."""
    runs = by_policies(run, requests) if compare and run.plan.replicas > 1 else (run,)
    enough = None if goal is None else goal.share_in(run) >= goal.share
    most = ceiling(run.plan.profile, requests, run.prefix_hit_rate)
    return PlanReport(runs, most, goal, enough, prices, wall_s)
