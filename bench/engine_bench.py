"""`specdec bench engine`: the same requests with and without speculation, interleaved, on one set of weights."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from bench.engine_runs import AUTO, OFF, GroupRun, RequestRun, Setting, WorkloadSummary
from bench.workloads.workload import BenchPrompt, Workload
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


class BenchError(SpecdecError):
    """The engine did not do what is measured: it failed a request, or the arms gave different texts."""


class InterleavedRun:
    """Runs ``requests``, ``at_once`` of them at a time (None: all), the next one entering as one leaves. ``names`` are
    their prompts'. The engine runs nothing else.

    ``busy_s``: seconds spent in `Engine.step`. The clock runs only there: what a benchmark does between steps, even
    another engine's step, does not count.
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
        self._first: dict[str, float] = {}
        self._places = min(len(requests), at_once or len(requests))
        self._full_s, self._full_tokens = 0.0, 0
        self.busy_s = 0.0

    @property
    def done(self) -> bool:
        """Whether all of them have ended."""
        return not self._waiting and not self._engine.has_work()

    def step(self) -> None:
        """One step of the engine.

        Raises:
            BenchError: the engine failed a request.
            RequestError: it refused one.
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
        if full:
            self._full_s += took_s
            self._full_tokens += sum(len(event.token_ids) for event in events if isinstance(event, Delta))
        for event in events:
            self._running -= isinstance(event, Finished)
            self._take(self._runs[event.request_id], event)

    def result(self) -> GroupRun:
        """How it went, once it is done."""
        return GroupRun(tuple(self._runs.values()), self.busy_s, self._full_s, self._full_tokens)

    def _take(self, run: RequestRun, event: RequestEvent) -> None:
        if isinstance(event, Failed):
            raise BenchError(f"{run.prompt}: the engine failed ({event.reason}: {event.message})")
        if isinstance(event, Delta):
            run.tokens += event.token_ids
            run.text += event.text
            if event.token_ids:
                if event.request_id not in self._first:
                    self._first[event.request_id], run.first_tokens = self.busy_s, len(event.token_ids)
                    run.first_s = self.busy_s - self._began[event.request_id]
                run.decode_s = self.busy_s - self._first[event.request_id]
        elif isinstance(event, Finished):
            run.reason, run.stats, run.usage = event.reason, event.stats, event.usage


def run_interleaved(runs: Seq[InterleavedRun]) -> None:
    """Run all of ``runs`` to their ends, each on an engine of its own. The next step is always that of the one that was
    busy for the least time so far: whatever the machine does meanwhile, it does to all of them.

    Raises:
        BenchError, RequestError: as `InterleavedRun.step`.
    """
    active = list(runs)
    while active := [run for run in active if not run.done]:
        min(active, key=lambda run: run.busy_s).step()


class EngineRunner:
    """``sampling`` needs a seed unless it is greedy, or the arms would draw different texts."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._sampling, self._clock = engine, sampling, clock
        self._serial = itertools.count()

    def run(self, group: Seq[BenchPrompt], arm: Setting, salt: str, at_once: int | None = None) -> GroupRun:
        """Run all of ``group`` to the end, with nothing else running; as `start`.

        Raises:
            BenchError, RequestError: as `InterleavedRun.step`.
        """
        run = self.start(group, arm, salt, at_once)
        run_interleaved([run])
        return run.result()

    def start(self, group: Seq[BenchPrompt], arm: Setting, salt: str, at_once: int | None = None) -> InterleavedRun:
        """``group``, ready for its first step, ``at_once`` prompts at a time (None: all). ``salt`` separates prefix
        cache and draft texts from other runs'.

        The prompts of a larger group are prefilled before, so that its time is that of decoding together.

        Raises:
            RequestError: the engine refused a prompt.
        """
        requests = [self._request(prompt, arm, salt) for prompt in group]
        if len(requests) > 1:
            self._prefill(requests)
        return InterleavedRun(self._engine, requests, [prompt.name for prompt in group], at_once, self._clock)

    def _prefill(self, requests: Seq[Request]) -> None:
        """Into the prefix cache, and nowhere else: drafters do not hear of it."""
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

    def _request(self, prompt: BenchPrompt, arm: Setting, salt: str) -> Request:
        return Request(
            f"bench-{next(self._serial)}",
            prompt.prompt_ids,
            self._sampling,
            prompt.stopping,
            speculation=arm.speculation,
            cache_salt=salt,
            prediction_ids=prompt.prediction_ids,
            session=f"{salt}/{prompt.session}" if prompt.session else "",
        )


ALL = 1_000_000  # more steps than any trace keeps
MIN_STEPS = 16


class ControlRow(NamedTuple):
    """Milliseconds over ``steps`` steps with so many ``sequences``."""

    sequences: int
    steps: int
    median_ms: float
    p99_ms: float


@dataclass(slots=True)
class ControlTimes:
    """Reads `StepTrace.control_ms` from an engine's decision trace. ``by_sequences``: milliseconds of every step."""

    by_sequences: dict[int, list[float]] = field(default_factory=dict)
    _seen: int = -1

    def collect(self, engine: Engine) -> None:
        """Steps since the last call count, as far as the engine still has them."""
        for trace in engine.trace(ALL):
            if trace.step > self._seen and trace.sequences:
                self.by_sequences.setdefault(trace.sequences, []).append(trace.control_ms)
            self._seen = max(self._seen, trace.step)

    def rows(self) -> Iterator[ControlRow]:
        """By rising number of sequences, those seen often enough."""
        for sequences, times in sorted(self.by_sequences.items()):
            if len(times) >= MIN_STEPS:
                median, p99 = np.percentile(times, (50, 99))
                yield ControlRow(sequences, len(times), float(median), float(p99))

    def as_dict(self) -> list[dict[str, Any]]:
        """JSON-able figures."""
        return [{**row._asdict(), "median_ms": round(row.median_ms, 4), "p99_ms": round(row.p99_ms, 4)}
                for row in self.rows()]  # fmt: skip


@dataclass(slots=True)
class WorkloadRuns:
    """``rounds``: per counted group, its run in every arm by the arm's name."""

    workload: str
    concurrent: bool
    rounds: list[dict[str, GroupRun]] = field(default_factory=list)

    def pairs(self, first: str, second: str) -> Iterator[tuple[RequestRun, RequestRun]]:
        """Every request's run in the one arm and in the other."""
        for by_arm in self.rounds:
            yield from zip(by_arm[first].requests, by_arm[second].requests, strict=True)

    def ms_per_token(self, arm: str) -> float | None:
        """Milliseconds of decoding per output token over the whole workload; where requests run at once, of all of them
        together, while all places are taken. None when nothing was long enough to time."""
        if self.concurrent:
            seconds = sum(by_arm[arm].full_s for by_arm in self.rounds)
            tokens = sum(by_arm[arm].full_tokens for by_arm in self.rounds)
        else:
            runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
            seconds, tokens = sum(run.decode_s for run in runs), sum(run.gaps for run in runs)
        return seconds / tokens * 1e3 if tokens and seconds > 0 else None

    def ms_per_token_beside_off(self, arm: str) -> float | None:
        """As `ms_per_token`, but from when plain decoding had its first token. An arm that drafts for the first token,
        for which a draft model reads the prompt, has several tokens then, but has them later: both count."""
        if self.concurrent:
            return self.ms_per_token(arm)
        pairs = list(self.pairs("off", arm))
        seconds = sum(run.first_s + run.decode_s - off.first_s for off, run in pairs)
        tokens = sum(run.gaps for _, run in pairs)
        return seconds / tokens * 1e3 if tokens and seconds > 0 else None

    def summary(self, base: str = "off", arm: str = "auto") -> WorkloadSummary:
        """``arm`` against ``base``."""
        timed = [(a.tpot_ms / b.tpot_ms, b.prompt) for a, b in self.pairs(base, arm) if a.tpot_ms and b.tpot_ms]
        ratios = [ratio for ratio, _ in timed]
        base_ms, arm_ms = self.ms_per_token(base), self.ms_per_token(arm)
        base_s, arm_s = (sum(by_arm[name].total_s for by_arm in self.rounds) for name in (base, arm))
        p10, median, p90 = (float(x) for x in np.percentile(ratios, (10, 50, 90))) if ratios else (None, None, None)
        worst, worst_prompt = min(timed) if timed else (None, "")
        runs = [run for by_arm in self.rounds for run in by_arm[arm].requests]
        steps = sum(run.stats.num_steps for run in runs)
        return WorkloadSummary(
            workload=self.workload,
            concurrent=self.concurrent,
            prompts=len(runs),
            timed=len(timed),
            base_ms=base_ms,
            arm_ms=arm_ms,
            ratio_p10=p10,
            ratio_median=median,
            ratio_p90=p90,
            total_ratio=base_ms / arm_ms if base_ms and arm_ms else None,
            whole_ratio=base_s / arm_s if self.concurrent and arm_s > 0 else None,
            worst=worst,
            worst_prompt=worst_prompt,
            tokens_per_step=sum(len(run.tokens) for run in runs) / steps if steps else None,
            drafters=_by_drafter(runs),
        )

    def as_dict(self) -> list[dict[str, Any]]:
        """Per prompt, its figures in every arm, JSON-able."""
        return [
            {
                "prompt": runs[0].prompt,
                "round": number,
                "arms": {name: run.as_dict() for name, run in zip(by_arm, runs, strict=True)},
                "ratio": _ratio(by_arm, index),
            }
            for number, by_arm in enumerate(self.rounds)
            for index, runs in enumerate(zip(*(group.requests for group in by_arm.values()), strict=True))
        ]


def _ratio(by_arm: dict[str, GroupRun], index: int) -> float | None:
    off, auto = by_arm["off"].requests[index].tpot_ms, by_arm["auto"].requests[index].tpot_ms
    return round(off / auto, 4) if off and auto else None


def _by_drafter(runs: list[RequestRun]) -> dict[str, DrafterStats]:
    found: dict[str, DrafterStats] = {}
    for name, part in ((n, p) for run in runs for n, p in run.stats.by_drafter.items()):
        total = found.setdefault(name, DrafterStats())
        total.num_draft_tokens += part.num_draft_tokens
        total.num_accepted_draft_tokens += part.num_accepted_draft_tokens
    return found


Say = Callable[[str], None]


class EngineBench:
    """Runs workloads; every group in all arms at once, a step of the one and a step of the other, before the next one.

    Each arm has an engine of its own over the same weights, caches and drafters, so that nothing one learns helps
    another, and a cache salt of its own per workload: what it drafts from is what itself has seen. ``engines``: arms,
    off and auto among them, and their engines.
    """

    def __init__(self, engines: Mapping[Setting, Engine], sampling: SamplingParams, say: Say) -> None:
        self._say, self._auto = say, engines[AUTO]
        self._runners = {arm: EngineRunner(engine, sampling) for arm, engine in engines.items()}
        self.control_times = ControlTimes()

    def run(self, workload: Workload) -> WorkloadRuns:
        """All prompts of ``workload`` in all arms.

        Raises:
            BenchError: the arms gave different tokens, or the engine failed.
            RequestError: the engine refused a prompt, mostly because it is too long for its context.
        """
        runs = WorkloadRuns(workload.name, workload.concurrent)
        for group in workload.groups:
            by_arm = self._group(workload, group)
            if group[0].counted:
                runs.rounds.append(by_arm)
                self._say(f"{workload.name} {len(runs.rounds)}/{workload.n_counted}: {_line(by_arm)}")
            else:
                self._say(f"{workload.name}: warming up with {group[0].name}")
        return runs

    def _group(self, workload: Workload, group: Seq[BenchPrompt]) -> dict[str, GroupRun]:
        runs = {
            arm.name: runner.start(group, arm, f"{workload.name}/{arm.name}", workload.at_once)
            for arm, runner in self._runners.items()
        }
        run_interleaved(list(runs.values()))
        self.control_times.collect(self._auto)
        by_arm = {name: run.result() for name, run in runs.items()}
        check_same_output(workload.name, by_arm)
        return by_arm


def check_same_output(workload: str, by_arm: dict[str, GroupRun]) -> None:
    """Path identity: every arm must give the tokens of plain decode.

    Raises:
        BenchError: one does not; names the prompt, the arm and the first place.
    """
    for name, group in by_arm.items():
        for plain, other in zip(by_arm[OFF.name].requests, group.requests, strict=True):
            if plain.tokens == other.tokens:
                continue
            same = [a == b for a, b in zip(plain.tokens, other.tokens, strict=False)]
            at = same.index(False) if False in same else len(same)
            raise BenchError(
                f"{workload}, {plain.prompt}: {name} gave other tokens than {OFF.name}, first at {at} "
                f"({other.tokens[at : at + 3]} for {plain.tokens[at : at + 3]}); path identity is broken, "
                "so the times compare nothing: run `specdec verify`"
            )


def _line(by_arm: dict[str, GroupRun]) -> str:
    """One group's figures in words."""
    parts = []
    for name, group in by_arm.items():
        (request, *others) = group.requests
        if others:
            parts.append(f"{name} {group.tokens_per_s:.1f} tokens/s")
        elif request.tpot_ms is not None:
            parts.append(f"{name} {request.tpot_ms:.1f}")
    return ", ".join(parts) or "too short to time"
