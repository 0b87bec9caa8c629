"""Runs the same requests with and without speculation, step by step in turns, on one set of weights."""

from __future__ import annotations

import dataclasses
import itertools
import statistics
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

from bench.engine_runs import AUTO, OFF, GroupRun, RequestRun, Setting
from bench.workloads.workload import Workload
from specdec.core.kv_cache import common_length
from specdec.core.types import (
    Delta,
    DrafterStats,
    Failed,
    Finished,
    Request,
    RequestEvent,
    SamplingParams,
    StoppingParams,
)
from specdec.engine.engine import Engine
from specdec.errors import SpecdecError
from specdec.load.figures import rounded
from specdec.load.request import LoadRequest


class BenchError(SpecdecError):
    """There is nothing to measure, the engine failed a request, or the arms returned different tokens."""


class InterleavedRun:
    """Runs requests on an engine that runs nothing else, up to ``at_once`` concurrently (None: all).

    names: of the requests' prompts. ``busy_s``: seconds spent in `Engine.step`; all times are measured on this clock,
    so work between steps, such as another engine's step, does not count.
    """

    def __init__(
        self,
        engine: Engine,
        requests: Seq[Request],
        names: Seq[str],
        at_once: int | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._engine, self._clock = engine, clock
        self._waiting, self._running = deque(requests), 0
        self._runs = {request.request_id: RequestRun(name) for request, name in zip(requests, names, strict=True)}
        self._began: dict[str, float] = {}
        self._places = min(len(requests), at_once or len(requests))
        self._full_s, self._full_tokens = 0.0, 0
        self.busy_s = 0.0
        self.steps_ms: list[float] = []  # duration of each step

    @property
    def done(self) -> bool:
        return not self._waiting and not self._engine.has_work()

    def step(self) -> None:
        """Run one step of the engine.

        Raises:
            BenchError: the engine failed a request.
            RequestError: the engine refused a request.
        """
        while self._waiting and self._running < self._places:
            request = self._waiting.popleft()
            self._engine.submit(request)
            self._began[request.request_id] = self.busy_s
            self._running += 1
        full = self._running == self._places
        began = self._clock()
        events = self._engine.step()
        took_s = self._clock() - began
        self.busy_s += took_s
        self.steps_ms.append(took_s * 1e3)
        if full:
            self._full_s += took_s
            self._full_tokens += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        for event in events:
            self._running -= isinstance(event, Finished)
            self._take(self._runs[event.request_id], event)

    def result(self) -> GroupRun:
        """The figures, once the run is done."""
        return GroupRun(tuple(self._runs.values()), self._full_s, self._full_tokens)

    def _take(self, run: RequestRun, event: RequestEvent) -> None:
        if isinstance(event, Failed):
            raise BenchError(f"{run.prompt}: the engine failed ({event.reason}: {event.message})")
        if isinstance(event, Delta):
            since_s = self.busy_s - self._began[event.request_id]
            if event.token_ids:
                if not run.tokens:
                    run.first_s, run.first_tokens = since_s, len(event.token_ids)
                run.decode_s = since_s - run.first_s
            run.tokens += event.token_ids
        elif isinstance(event, Finished):
            run.reason, run.stats, run.usage = event.reason, event.stats, event.usage


def run_interleaved(runs: Seq[InterleavedRun]) -> None:
    """Run all of ``runs``, each on its own engine, to their ends.

    The next step always belongs to the run that was busy for the least time, so that changes of the machine's speed
    affect all runs alike.

    Raises:
        BenchError, RequestError: as `InterleavedRun.step`.
    """
    active = list(runs)
    while active := [run for run in active if not run.done]:
        min(active, key=lambda run: run.busy_s).step()


class EngineRunner:
    """Starts runs on one engine. Unless it is greedy, ``sampling`` needs a seed, so that all arms sample the same."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._sampling, self._clock = engine, sampling, clock
        self._serial = itertools.count()

    def start(self, group: Seq[LoadRequest], arm: Setting, salt: str, at_once: int | None = None) -> InterleavedRun:
        """A run of ``group``, ready for its first step.

        at_once: concurrent prompts; None: all. salt: separates the prefix cache and draft texts from other runs. The
        prompts of a group of several are prefilled before, so that its time is that of decoding.

        Raises:
            RequestError: the engine refused a prompt.
        """
        requests = [self._request(prompt, arm, salt) for prompt in group]
        if len(requests) > 1:
            self._prefill(requests)
        return InterleavedRun(self._engine, requests, [prompt.name for prompt in group], at_once, self._clock)

    def _prefill(self, requests: Seq[Request]) -> None:
        """Fill the prefix cache; drafters learn nothing from it."""
        for request in requests:
            self._engine.submit(
                dataclasses.replace(
                    request,
                    request_id=f"{request.request_id}-prefill",
                    stopping=StoppingParams(max_tokens=0),
                    speculation=OFF.speculation,
                )
            )
        while self._engine.has_work():
            self._engine.step()

    def _request(self, prompt: LoadRequest, arm: Setting, salt: str) -> Request:
        return Request(
            f"bench-{next(self._serial)}",
            prompt.ids,
            self._sampling,
            prompt.stopping,
            speculation=arm.speculation,
            cache_salt=salt,
            prediction_ids=prompt.prediction if isinstance(prompt.prediction, tuple) else (),
            session=f"{salt}/{prompt.session}" if prompt.session else "",
        )


@dataclass(slots=True)
class WorkloadRuns:
    workload: str
    concurrent: bool
    rounds: list[dict[str, GroupRun]] = field(default_factory=list)  # per counted group, its run by name of the arm

    def pairs(self, first: str, second: str) -> Iterator[tuple[RequestRun, RequestRun]]:
        """Every request's runs in two arms."""
        for by_arm in self.rounds:
            yield from zip(by_arm[first].requests, by_arm[second].requests, strict=True)

    def ms_per_token(self, arm: str) -> float | None:
        """Milliseconds of decoding per output token over the whole workload; None if nothing was long enough to time.

        Of concurrent requests, the time per token of all together, while the maximal number of them runs.
        """
        if self.concurrent:
            seconds = sum(by_arm[arm].full_s for by_arm in self.rounds)
            tokens = sum(by_arm[arm].full_tokens for by_arm in self.rounds)
        else:
            runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
            seconds, tokens = sum(run.decode_s for run in runs), sum(run.gaps for run in runs)
        return seconds / tokens * 1e3 if tokens and seconds > 0 else None

    def ms_per_token_beside_off(self, arm: str) -> float | None:
        """As `ms_per_token`, but counted from plain decoding's first token. An arm that drafts before the first token
        gets it later, because its draft model reads the prompt, but gets several at once: both count."""
        if self.concurrent:
            return self.ms_per_token(arm)
        pairs = list(self.pairs(OFF.name, arm))
        seconds = sum(run.first_s + run.decode_s - off.first_s for off, run in pairs)
        tokens = sum(run.gaps for _, run in pairs)
        return seconds / tokens * 1e3 if tokens and seconds > 0 else None

    def tokens_per_step(self, arm: str) -> float | None:
        runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
        steps = sum(run.stats.num_steps for run in runs)
        return sum(len(run.tokens) for run in runs) / steps if steps else None

    def drafters(self, arm: str) -> dict[str, DrafterStats]:
        """By name, over all requests."""
        found: dict[str, DrafterStats] = {}
        for run in (run for by_arm in self.rounds for run in by_arm[arm].requests):
            for name, part in run.stats.by_drafter.items():
                found.setdefault(name, DrafterStats()).add(part)
        return found

    def summary(self) -> dict[str, Any]:
        """Auto against off, as JSON types. Ratios are times of off over auto: above 1, auto is faster. None: nothing
        was long enough to time."""
        pairs = list(self.pairs(OFF.name, AUTO.name))
        timed = [(off.tpot_ms / auto.tpot_ms, off.prompt) for off, auto in pairs if off.tpot_ms and auto.tpot_ms]
        worst, worst_prompt = min(timed, default=(None, ""))
        off_ms, auto_ms = self.ms_per_token(OFF.name), self.ms_per_token(AUTO.name)
        figures: dict[str, Any] = {
            "prompts": len(pairs),
            "timed": len(timed),  # prompts with a ratio of their own
            "off_ms_per_token": rounded(off_ms),
            "auto_ms_per_token": rounded(auto_ms),
            "ratio_median": rounded(statistics.median(ratio for ratio, _ in timed)) if timed else None,
            "ratio_total": rounded(off_ms / auto_ms) if off_ms and auto_ms else None,
            "ratio_worst": rounded(worst),
            "worst_prompt": worst_prompt,
            "tokens_per_step": rounded(self.tokens_per_step(AUTO.name)),
            "drafters": {
                name: {
                    "verified": part.num_draft_tokens,
                    "accepted": part.num_accepted_draft_tokens,
                    "acceptance": rounded(part.draft_acceptance_rate),
                }
                for name, part in sorted(self.drafters(AUTO.name).items())
            },
        }
        if self.concurrent:
            figures["off_tokens_per_s"] = rounded(1e3 / off_ms) if off_ms else None
            figures["auto_tokens_per_s"] = rounded(1e3 / auto_ms) if auto_ms else None
        return figures

    def as_dict(self, arm: str = AUTO.name) -> list[dict[str, Any]]:
        """Figures of every prompt in every arm, as JSON types; ``ratio``: off's time over that of ``arm``."""
        return [
            {
                "prompt": runs[0].prompt,
                "round": number,
                "arms": {name: run.as_dict() for name, run in zip(by_arm, runs, strict=True)},
                "ratio": _ratio(by_arm[OFF.name].requests[index], by_arm[arm].requests[index]),
            }
            for number, by_arm in enumerate(self.rounds)
            for index, runs in enumerate(zip(*(group.requests for group in by_arm.values()), strict=True))
        ]


def _ratio(off: RequestRun, run: RequestRun) -> float | None:
    return round(off.tpot_ms / run.tpot_ms, 4) if off.tpot_ms and run.tpot_ms else None


Say = Callable[[str], None]


class EngineBench:
    """Runs workloads group by group, each group in all arms step by step in turns.

    engines: by arm, `OFF` included. Each arm has its own engine over the same weights, KV cache and
    drafters, so that no arm profits from what another learned, and its own cache salt per workload, so that it drafts
    only from texts that it has seen itself.
    """

    def __init__(self, engines: Mapping[Setting, Engine], sampling: SamplingParams, say: Say) -> None:
        self._say = say
        self._runners = {arm: EngineRunner(engine, sampling) for arm, engine in engines.items()}

    def rounds(self, workload: Workload) -> Iterator[dict[str, GroupRun]]:
        """Run all prompts of ``workload`` in all arms; yields each counted group, by name of the arm, when it ends.

        Raises:
            BenchError: the arms returned different tokens, or the engine failed.
            RequestError: the engine refused a prompt, for example because it is too long for the context.
        """
        number = 0
        for group in workload.groups:
            by_arm = self._group(workload, group)
            if group[0].counted:
                number += 1
                self._say(f"{workload.name} {number}/{workload.n_counted}: {_line(by_arm)}")
                yield by_arm
            else:
                self._say(f"{workload.name}: warming up with {group[0].name}")

    def _group(self, workload: Workload, group: Seq[LoadRequest]) -> dict[str, GroupRun]:
        runs = {
            arm.name: runner.start(group, arm, f"{workload.name}/{arm.name}", workload.at_once)
            for arm, runner in self._runners.items()
        }
        run_interleaved(list(runs.values()))
        by_arm = {name: run.result() for name, run in runs.items()}
        check_same_output(workload.name, by_arm)
        return by_arm


def check_same_output(workload: str, by_arm: dict[str, GroupRun]) -> None:
    """Check path identity: every arm must return the tokens of plain decoding.

    Raises:
        BenchError: an arm does not; names the prompt, the arm and the first difference.
    """
    for name, group in by_arm.items():
        for plain, other in zip(by_arm[OFF.name].requests, group.requests, strict=True):
            if plain.tokens == other.tokens:
                continue
            at = common_length(plain.tokens, other.tokens)
            raise BenchError(
                f"{workload}, {plain.prompt}: {name} returned other tokens than {OFF.name}, first at {at} "
                f"({other.tokens[at : at + 3]} for {plain.tokens[at : at + 3]}); path identity is broken, "
                "so the times cannot be compared: run `specdec verify`"
            )


def _line(by_arm: dict[str, GroupRun]) -> str:
    """A progress line with one group's figures."""
    parts = []
    for name, group in by_arm.items():
        (request, *others) = group.requests
        if others:
            parts.append(f"{name} {group.tokens_per_s:.1f} tokens/s")
        elif request.tpot_ms is not None:
            parts.append(f"{name} {request.tpot_ms:.1f}")
    return ", ".join(parts) or "too short to time"
