"""How many replicas keep an objective, what one of them can do at most, and what they cost."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import fmean
from typing import Any

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.profile import Profile
from cluster.plan.simulate import FleetPlan, FleetRun, simulate
from specdec.control.estimates.costs import CostTable
from specdec.errors import ConfigError
from specdec.load.request import Objective, Record
from verify_kernels.forward_batch import PAGE_SIZE


@dataclass(frozen=True, slots=True)
class Goal:
    """At least ``share`` of the requests that are sent are to be answered within every one of ``objectives``: of one
    objective, a share of 0.99 is its p99; of several, goodput.

    Raises:
        ConfigError: there is no objective, the share is out of range, or an objective is about messages, which a plan
            does not tell apart.
    """

    objectives: tuple[Objective, ...]
    share: float = 0.99

    def __post_init__(self) -> None:
        if not self.objectives:
            raise ConfigError("objective: give at least one, such as ttft:500")
        if any(limit.metric == "itl" for limit in self.objectives):
            raise ConfigError("objective: a plan knows ttft, tpot and e2e, not itl")
        if not 0 < self.share <= 1:
            raise ConfigError(f"share: must be above 0 and at most 1, not {self.share:g}")

    def kept_by(self, record: Record) -> bool:
        """Whether one request keeps them."""
        return record.ok and all(limit.kept_by(record) for limit in self.objectives)

    def share_in(self, run: FleetRun) -> float:
        """Of a run that went to its end."""
        return fmean(self.kept_by(record) for record in run.records) if run.records else 1.0


class _Misses:
    """Counts the requests that miss a goal, up to more than it allows."""

    def __init__(self, goal: Goal, requests: int) -> None:
        self._goal, self._left = goal, requests - goal.share * requests

    def __call__(self, record: Record) -> bool:
        """Whether the goal can not be reached any more."""
        self._left -= not self._goal.kept_by(record)
        return self._left < -1e-9


def least_replicas(
    plan: FleetPlan,
    requests: Sequence[PlannedRequest],
    goal: Goal,
    most: int,
    tried: Callable[[int, bool], None] | None = None,
) -> FleetRun | None:
    """The run of the fewest replicas, at most ``most``, that keep ``goal``; None: even so many do not. ``plan``: of the
    fleet, but for its number. tried: is told of each number and whether it was enough.

    Doubles and halves, which takes for granted that more replicas never do worse; runs of too few are broken off as
    soon as that is certain.
    """

    def enough(replicas: int) -> FleetRun | None:
        run = simulate(replace(plan, replicas=replicas), requests, _Misses(goal, len(requests)))
        if tried is not None:
            tried(replicas, run.whole)
        return run if run.whole else None

    most = max(1, min(most, len(requests)))  # more than one for each request are no better
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
    """What one replica can do at most. sequences: of the traffic's mean length that fit its KV cache and its batch at a
    time, ``kv_sequences`` its cache alone. Output tokens per second: one_stream of one sequence, decode of all that
    fit, both by the measured forwards, without prompts; with_prompts: in the long run, prompts included, those cached
    left out. memory_one_stream, memory_decode: the same two by bytes over bandwidth, which no kernel passes; None where
    these are not known."""

    sequences: int
    kv_sequences: int
    one_stream: float
    decode: float
    with_prompts: float
    memory_one_stream: float | None
    memory_decode: float | None

    def as_dict(self) -> dict[str, Any]:
        """JSON-able."""
        return {name: round(value, 2) if value is not None else None for name, value in asdict(self).items()}


def ceiling(profile: Profile, requests: Sequence[PlannedRequest], hit_rate: float) -> Ceiling:
    """Of ``profile`` under ``requests``, of whose prompts the share ``hit_rate`` is cached."""
    prompt = fmean(one.prompt_tokens for one in requests)
    output = fmean(one.output_tokens for one in requests)
    pages = -(-round(prompt + output) // PAGE_SIZE)
    kv_sequences = profile.limits.kv_tokens // PAGE_SIZE // pages
    fit = max(1, min(profile.limits.max_batch, kv_sequences))
    context, costs = prompt + output / 2, CostTable.from_dict(profile.verify)
    per_step, memory = profile.tokens_per_step, profile.memory
    noise = fmean(profile.noise) if profile.noise else 1.0

    def measured(sequences: int) -> float:
        return 1e3 * sequences * per_step / _step_ms(profile, costs, sequences, context, noise)

    def by_memory(sequences: int) -> float | None:
        if not (memory.bytes_per_s and memory.weight_bytes):
            return None
        read = memory.weight_bytes + sequences * context * memory.kv_token_bytes
        return sequences * per_step * memory.bytes_per_s / read

    decode = max(measured(sequences) for sequences in range(1, fit + 1))
    chunk = profile.limits.prefill_chunk
    read_s = prompt * (1 - hit_rate) * costs.ms(chunk, prompt / 2) * noise / chunk / 1e3
    return Ceiling(
        fit, kv_sequences, measured(1), decode, output / (read_s + output / decode), by_memory(1), by_memory(fit)
    )


def _step_ms(profile: Profile, costs: CostTable, sequences: int, context: float, noise: float) -> float:
    """Of a step in which so many sequences sample and draft as they use to."""
    overheads, drafted = profile.overheads, profile.drafted
    rows = round(sequences * (1 + profile.nodes_per_step))
    draft_ms = fmean(step.draft_ms for step in drafted) if drafted else 0.0
    other_ms = overheads.step_ms + overheads.step_ms_per_sequence * sequences + draft_ms
    return costs.ms(rows, context) * noise + other_ms


HOURS_A_YEAR = 8766.0


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars. per_hour: of a replica's machine where it is hired; else it is bought for ``hardware``, lasts ``years``,
    and takes ``watts`` at ``per_kwh``. api_prompt, api_output: what somebody else asks for a million tokens.

    Raises:
        ConfigError: a figure is negative, or the machine is both hired and bought.
    """

    per_hour: float = 0.0
    hardware: float = 0.0
    years: float = 3.0
    watts: float = 0.0
    per_kwh: float = 0.0
    api_prompt: float = 0.0
    api_output: float = 0.0

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if not 0 <= value < float("inf"):
                raise ConfigError(f"prices: {name} must not be negative, not {value:g}")
        if self.per_hour and (self.hardware or self.watts):
            raise ConfigError(
                "prices: per_hour is of a hired machine, hardware and watts of an own one; give one of them"
            )
        if not self.years:
            raise ConfigError("prices: years must be positive")

    @property
    def replica_hour(self) -> float:
        """A replica for an hour."""
        return self.per_hour or self.hardware / (self.years * HOURS_A_YEAR) + self.watts / 1e3 * self.per_kwh

    def of(self, run: FleetRun) -> dict[str, float] | None:
        """What the traffic of ``run`` costs with its replicas, and at the other's prices; None without any price.

        ``worth_it_from``: share of that traffic from which on the own replicas are the cheaper ones.
        """
        if not self.replica_hour:
            return None
        rates = run.as_dict()["throughput"]
        hour = run.plan.replicas * self.replica_hour
        prompts, outputs = rates["prompt_tokens_per_s"] * 3600 / 1e6, rates["output_tokens_per_s"] * 3600 / 1e6
        found = {"dollars_per_hour": hour, "dollars_per_million_output_tokens": hour / outputs if outputs else 0.0}
        api = prompts * self.api_prompt + outputs * self.api_output
        if api:
            found |= {"api_dollars_per_hour": api, "worth_it_from": hour / api}
        return {name: round(value, 4) for name, value in found.items()}
