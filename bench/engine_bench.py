"""`specdec bench engine`: the same requests with and without speculation, at the same time, on one set of weights."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq

from bench.engine_arm import AUTO, OFF, Arm
from bench.engine_bench_error import BenchError
from bench.engine_control_times import ControlTimes
from bench.engine_flight import fly
from bench.engine_group_run import GroupRun
from bench.engine_runner import EngineRunner
from bench.engine_workload_runs import WorkloadRuns
from bench.workloads.bench_prompt import BenchPrompt
from bench.workloads.workload import Workload
from specdec.engine.engine import Engine
from specdec.types import SamplingParams

Say = Callable[[str], None]


class EngineBench:
    """Runs workloads; every group in all arms at once, a step of the one and a step of the other, before the next one.

    Each arm has an engine of its own over the same weights, caches and drafters, so that nothing one learns helps
    another, and a cache salt of its own per workload: what it drafts from is what itself has seen. ``engines``: arms,
    off and auto among them, and their engines.
    """

    def __init__(self, engines: Mapping[Arm, Engine], sampling: SamplingParams, say: Say) -> None:
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
        flights = {
            arm.name: runner.start(group, arm, f"{workload.name}/{arm.name}", workload.at_once)
            for arm, runner in self._runners.items()
        }
        fly(list(flights.values()))
        self.control_times.collect(self._auto)
        by_arm = {name: flight.result() for name, flight in flights.items()}
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
