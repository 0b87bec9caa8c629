"""The number of replicas that meets an objective, the capacity of one replica, and the report of a plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from rich.table import Table

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.profile import Profile
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from specdec.control.estimates.costs import CostTable
from specdec.errors import ConfigError
from specdec.load.figures import QUANTILES
from specdec.load.request import Objective, Record
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``share`` of the requests sent meet all ``objectives``: with one objective, 0.99 is its p99; with
    several, goodput.

    Raises:
        ConfigError: there is no objective, the share is out of range, or the objective is itl, which is not simulated.
    """

    objectives: tuple[Objective, ...]
    share: float = 0.99

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ConfigError("objective: at least one is needed, such as ttft:500")
        if any(limit.metric == "itl" for limit in self.objectives):
            raise ConfigError("objective: a plan supports ttft, tpot and e2e, not itl")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share: must be above 0 and at most 1, not {self.share:g}")

    def kept_by(self, record: Record) -> bool:
        """Whether a request meets the objectives."""
        return record.ok and all(limit.kept_by(record) for limit in self.objectives)

    def share_in(self, run: FleetRun) -> float:
        """The share of requests that meet the objectives."""
        return fmean(self.kept_by(record) for record in run.records) if run.records else 1.0


class _Misses:
    """Counts the requests that miss a goal."""

    def __init__(self, goal: Goal, requests: int) -> None:
        self._goal, self._left = goal, requests - goal.share * requests

    def __call__(self, record: Record) -> bool:
        """Whether the goal cannot be met any more."""
        self._left -= not self._goal.kept_by(record)
        return self._left < -1e-9


def least_replicas(
    plan: FleetPlan,
    requests: Sequence[PlannedRequest],
    goal: Goal,
    most: int,
    tried: Callable[[int, bool], None] | None = None,
) -> FleetRun | None:
    """Returns the run of the fewest replicas that meet ``goal``; None: ``most`` replicas do not. ``plan``: the fleet;
    its number of replicas is ignored. tried: called with each number, and whether it was enough.

    Doubles, then bisects: assumes that more replicas never do worse. Runs stop as soon as the goal is missed.
    """

    def enough(replicas: int) -> FleetRun | None:
        run = simulate(replace(plan, replicas=replicas), requests, _Misses(goal, len(requests)))
        if tried is not None:
            tried(replicas, run.whole)
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
class Ceiling:
    """The capacity of one replica, for sequences of the traffic's mean length. Rates are output tokens per second."""

    sequences: int  # that fit the KV cache and the batch
    kv_sequences: int  # that fit the KV cache
    one_stream: float  # of one sequence, by measured forwards, without prompts
    decode: float  # of all sequences that fit, by measured forwards, without prompts
    with_prompts: float  # sustained, including prompts that are not cached

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: round(value, 2) for name, value in asdict(self).items()}


def ceiling(profile: Profile, requests: Sequence[PlannedRequest], hit_rate: float) -> Ceiling:
    """The capacity of ``profile`` under ``requests``. hit_rate: share of their prompts that is cached."""
    prompt = fmean(one.prompt_tokens for one in requests)
    output = fmean(one.output_tokens for one in requests)
    pages = -(-round(prompt + output) // PAGE_SIZE)
    kv_sequences = profile.limits.kv_tokens // PAGE_SIZE // pages
    fit = max(1, min(profile.limits.max_batch, kv_sequences))
    context, costs = prompt + output / 2, CostTable.from_dict(profile.verify)
    per_step = profile.tokens_per_step
    noise = fmean(profile.noise) if profile.noise else 1.0

    def measured(sequences: int) -> float:
        return 1e3 * sequences * per_step / _step_ms(profile, costs, sequences, context, noise)

    decode = max(measured(sequences) for sequences in range(1, fit + 1))
    chunk = profile.limits.prefill_chunk
    read_s = prompt * (1 - hit_rate) * costs.ms(chunk, prompt / 2) * noise / chunk / 1e3
    return Ceiling(fit, kv_sequences, measured(1), decode, output / (read_s + output / decode))


def _step_ms(profile: Profile, costs: CostTable, sequences: int, context: float, noise: float) -> float:
    """Milliseconds of a step in which so many sequences sample, with their mean drafts."""
    overheads, drafted = profile.overheads, profile.drafted
    rows = round(sequences * (1 + profile.nodes_per_step))
    draft_ms = fmean(step.draft_ms for step in drafted) if drafted else 0.0
    other_ms = overheads.step_ms + overheads.step_ms_per_sequence * sequences + draft_ms
    return costs.ms(rows, context) * noise + other_ms


@dataclass(frozen=True, slots=True)
class PlanReport:
    """The figures of a plan."""

    run: FleetRun
    ceiling: Ceiling
    goal: Goal | None
    enough: bool | None  # whether the replicas meet the goal; None: no goal
    wall_s: float

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        profile = self.run.plan.profile
        return {
            "target": profile.target, "machine": profile.machine, "tokens_per_step": round(profile.tokens_per_step, 3),
            "goal": self._goal(), **self.run.as_dict(), "ceiling": self.ceiling.as_dict(),
            "wall_s": round(self.wall_s, 2),
        }  # fmt: skip

    def _goal(self) -> dict[str, Any] | None:
        if self.goal is None:
            return None
        limits = [str(limit) for limit in self.goal.objectives]
        kept = round(self.goal.share_in(self.run), 4)
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
        table.add_row("prefix hits", f"{figures['prefix_hit_rate']:.1%}")
        table.add_row("requests of the busiest replica over the mean", f"{figures['max_over_mean_requests']:.2f}")
        table.add_row("tokens per step", f"{figures['tokens_per_step']:.2f}")
        table.add_row("sequences that fit a replica", f"{most.sequences} (its KV cache alone: {most.kv_sequences})")
        table.add_row("at most, output tokens/s a replica", (
            f"{most.with_prompts:.0f} with prompts, {most.decode:.0f} without, {most.one_stream:.0f} of one stream"
        ))  # fmt: skip
        table.add_row("simulated in", f"{figures['wall_s']:.1f} s, {figures['steps']} steps")
        return table


def make_report(run: FleetRun, requests: Sequence[PlannedRequest], goal: Goal | None, wall_s: float) -> PlanReport:
    """Reports ``run``."""
    enough = None if goal is None else goal.share_in(run) >= goal.share
    most = ceiling(run.plan.profile, requests, run.prefix_hit_rate)
    return PlanReport(run, most, goal, enough, wall_s)
