"""A run of an experiment that sends each request to both arms."""

from __future__ import annotations

import asyncio
import datetime
import itertools
import math
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from hashlib import blake2b
from pathlib import Path

from bench.experiment.plan import ArmServer, Batch, OpenArm, Script, open_arm, read_arm
from bench.experiment.run_folder import Progress, RunFolder, open_run, record_of
from bench.machine import host_facts
from bench.serve.load import LoadRun
from server.experiment.analysis.analyse import analyse
from server.experiment.config import ExperimentConfig
from server.experiment.folder import Manifest
from server.experiment.records import Choice, ExperimentError, Record, RunClock
from specdec.load.request import Record as Seen
from specdec.load.request import TimedRequest

_PATIENCE = 3  # turns in a row without an answer, after which a run ends
_DECIDED = ("better", "worse", "equivalent")
_GROWTH = 1.1  # of the pairs between two analyses, so that all together cost about ten times the last


class PairedRun:
    """A run that records into ``folder``. by_ids: outputs are compared by token ids, else by text.

    A turn's records are written together, pair by pair, once both arms have answered. A kill then leaves at most one
    record without its pair, which the analysis excludes.
    """

    def __init__(
        self, folder: RunFolder, arms: tuple[OpenArm, OpenArm], by_ids: bool, watch: Callable[[Progress], None]
    ) -> None:
        self._folder, self._arms, self._by_ids, self._watch = folder, arms, by_ids, watch
        self._config = folder.manifest.config
        self._script = Script(self._config, folder.attempt)
        self._clock = RunClock(folder.manifest.started_s, asyncio.get_running_loop().time)
        self._next_look = self._config.stopping.min_units  # pairs at which the records are analysed again
        self._silent = 0  # turns in a row without an answer
        self.progress = Progress(self._config, self._script.planned)
        self.progress.add(folder.log.records)

    async def run(self) -> str:
        """Send the remaining requests; returns why the run ended.

        Raises:
            ExperimentError: the servers no longer answer, or a record cannot be written.
        """
        done = [number for pair in self.progress.done if (number := self._script.number(pair)) is not None]
        turns = self._script.turns(frozenset(done))
        earlier_s = _measured_s(self._folder.log.records)
        if why := self._why(earlier_s):
            return why
        for first in turns:
            for turn in self._script.warm_up():
                await self._take(turn, warm_up=True)
            begun_s = self._clock.now() - earlier_s
            for turn in itertools.chain([first], turns):
                await self._take(turn)
                if why := self._why(self._clock.now() - begun_s):
                    return why
        return "all planned requests were sent"

    def _why(self, spent_s: float) -> str:
        """Why the run ends after ``spent_s`` seconds; empty: it goes on. Analyses the growing records if the plan's
        intervals are always valid."""
        stopping, pairs, mismatched = self._config.stopping, len(self.progress.done), len(self.progress.mismatched)
        if stopping.max_duration is not None and spent_s >= stopping.max_duration:
            return f"{stopping.max_duration:g} s have passed"
        if stopping.rule != "always_valid" or pairs < self._next_look:
            return ""
        self._next_look = max(pairs + 1, math.ceil(pairs * _GROWTH))
        if mismatched and self._config.assignment.expect_same_tokens:
            return f"{mismatched} pairs got different tokens, which more records cannot change"
        result = analyse(self._folder.manifest, self._folder.log)
        kind = result.verdict.kind
        # An open guardrail may still break, which turns better and equivalent into worse.
        is_open = kind != "worse" and any(guardrail.state == "open" for guardrail in result.guardrails)
        return f"the verdict is certain: {kind}" if kind in _DECIDED and not is_open else ""

    async def _take(self, turn: Batch, *, warm_up: bool = False) -> None:
        """Send a turn's requests to both arms, and write their records. Raises as `run`."""
        seen: list[dict[str, Seen]] = [{}, {}]
        for arm in (turn.first, 1 - turn.first):
            seen[arm] = await self._play(arm, turn)
        records, scheduled = [], self._config.load.open_loop
        for _, ask in turn.asks:
            for side, found in zip(self._arms, seen, strict=True):
                choice = Choice(
                    side.name, ask.session, warm_up=warm_up, request=f"{ask.name}/{side.name}", pair=ask.name
                )
                answer = found[ask.name]
                records.append(record_of(answer, choice, self._clock, scheduled=scheduled, by_ids=self._by_ids))
        self._folder.write(records)
        self.progress.add(records)
        self._watch(self.progress)
        self._silent = 0 if any(record.ok for record in records) else self._silent + 1
        if self._silent >= _PATIENCE:
            raise ExperimentError(
                f"the servers no longer answer ({records[-1].error}); the same command resumes {self._folder.path}"
            )

    async def _play(self, arm: int, turn: Batch) -> dict[str, Seen]:
        """Send a turn's requests to an arm; returns their outcome by pair."""
        load, side = self._config.load, self._arms[arm]
        asks = [TimedRequest(at_s, side.request.apply(self._script.in_arm(arm, ask))) for at_s, ask in turn.asks]
        run = LoadRun(side.endpoint, load.timeout_s)
        if load.open_loop:
            await run.on_schedule(asks)
        else:
            await run.in_turns((ask for _, ask in asks), load.concurrency, len(asks), None)
        return {seen.name: seen for seen in run.records}


def _measured_s(records: Sequence[Record]) -> float:
    """The duration of the earlier attempts of a paired run, from the first request to the last answer of each."""
    times: dict[str, list[float]] = {}
    for record in records:
        if not record.warm_up and record.end is not None:
            times.setdefault(Script.attempt(record.pair), []).extend((record.arrival, record.end))
    return sum(max(attempt) - min(attempt) for attempt in times.values())


async def run_experiment(
    config: ExperimentConfig, servers: tuple[ArmServer, ArmServer], out: Path, watch: Callable[[Progress], None]
) -> str:
    """Run the experiment and record into ``out``, or resume the run there; returns why it ended. ``watch`` is called
    with the progress now and then.

    Raises:
        ExperimentError: a server does not answer or rejects an arm's requests, or the folder cannot be used.
        WorkloadUnavailableError: the prompts are not installed.
        ConfigError: the trace cannot be read.
    """
    probe = Script(config, 0).probe()
    async with AsyncExitStack() as stack:
        arms = [
            await stack.enter_async_context(open_arm(name, read_arm(arm.request)[0], side, config.load.temperature))
            for (name, arm), side in zip(config.arms.items(), servers, strict=True)
        ]
        both = (arms[0], arms[1])
        by_ids = all([await arm.probe(probe) for arm in both])
        host = host_facts()
        facts = {"cpu": host["cpu"], "cores": str(host["cores"]), "commit": host["commit"] or "unknown"}
        facts |= load_facts(config) | _server_facts(both, servers)
        facts["outputs compared by"] = "token ids" if by_ids else "text"
        started = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
        with open_run(out, Manifest(config=config, started=started, facts=facts)) as folder:
            return await PairedRun(folder, both, by_ids, watch).run()


def load_facts(config: ExperimentConfig) -> dict[str, str]:
    """The load, in words."""
    load = config.load
    facts: dict[str, str] = {"caches": load.cache}
    if load.trace is not None:
        # The digest detects a trace that changed between a run and its resumption.
        digest = blake2b(load.trace.read_bytes(), digest_size=8).hexdigest()
        return facts | {"load": f"replay of {load.trace.name} ({digest}) at {load.speed:g} x"}
    facts["prompts"] = str(load.workload)
    if load.rate is None:
        return facts | {"load": f"closed loop, {load.concurrency} at once"}
    return facts | {"load": f"open loop, {load.arrivals}, {load.rate:g} requests/s"}


def _server_facts(arms: tuple[OpenArm, OpenArm], servers: tuple[ArmServer, ArmServer]) -> dict[str, str]:
    """The servers' descriptions, merged if both are the same."""
    each = [arm.facts | {"server": side.shown} for arm, side in zip(arms, servers, strict=True)]
    first, second = each
    facts = {name: value for name, value in first.items() if second.get(name) == value}
    for arm, found in zip(arms, each, strict=True):
        facts |= {f"{name} ({arm.name})": value for name, value in found.items() if name not in facts}
    return facts
