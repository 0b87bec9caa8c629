"""What a running experiment takes of each request: to give it an arm, and to write down what became of it."""

from __future__ import annotations

import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.engine_supervisor import EngineSupervisor
from server.experiment.config import Unit, parse_config
from server.experiment.live.plan import make_plan
from server.experiment.live.recording import Participation, record_of
from server.experiment.live.traffic import LiveTraffic, RunningExperiment, Submit
from server.experiment.records import RecordWriter, RunClock
from server.observe.metrics import ServerMetrics
from server.observe.records import RequestRecord
from server.request_stream import RequestStream
from specdec.config import Config, EngineConfig
from specdec.core.types import (
    Delta,
    EngineInfo,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    SpeculationStats,
    Started,
    Timings,
    Usage,
)
from specdec.load.figures import spread

UNITS: tuple[Unit, ...] = ("request", "session", "user", "prompt")
MESSAGES = 32
_CALLER = Principal("ada", "team")
_PLAN = """\
name: cost
arms:
  narrow: {{request: {{speculation: {{width: 1}}}}}}
  wide: {{request: {{speculation: {{width: 2}}, priority: 1}}}}
assignment: {{mode: hash, unit: {unit}}}
"""
_INFO = EngineInfo(
    target="none", draft=None, dtype="int8", kernels="reference", numeric_mode="bitwise", max_context=8192,
    vocab_size=1 << 17, kv_tokens=1 << 17, max_batch=64, drafters=(), eos_ids=(), threads=1, version="0",
    kv_dtype="fp32",
)  # fmt: skip


class ExperimentCost:
    """Everything but the engine is what a server runs. ``requests`` are timed for each figure; their prompts have
    ``prompt_tokens`` tokens."""

    def __init__(self, requests: int, prompt_tokens: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._requests, self._clock = requests, clock
        self._prompt = tuple(7919 * i % (1 << 17) for i in range(prompt_tokens))  # only its length matters

    def run(self) -> dict[str, dict[str, float]]:
        """Microseconds, median and 99th percentile, by figure: ``assign_UNIT``; ``message``: one of an answer's, as its
        part sees it; ``record``: made and written."""
        figures: dict[str, dict[str, float]] = {}
        for unit in UNITS:
            with _running(unit) as experiment:
                figures[f"assign_{unit}"] = _summary(self._assign(experiment))
        with _running("session") as experiment, tempfile.TemporaryDirectory() as folder:
            messages, records = self._record(experiment, Path(folder))
        return figures | {"message": _summary(messages), "record": _summary(records)}

    def _assign(self, experiment: RunningExperiment) -> list[float]:
        """What is added to letting a request in, without which the same is done."""
        traffic, seconds = LiveTraffic([experiment], allow_override=True), []
        for number in range(self._requests):
            request = self._request(number)
            stream = _stream(request)
            begun = self._clock()
            traffic.admit(_CALLER, request, "", _giving(stream))
            seconds.append(self._clock() - begun)
            assert stream.record is not None
            assert stream.record.watchers
        return seconds

    def _record(self, experiment: RunningExperiment, folder: Path) -> tuple[list[float], list[float]]:
        messages: list[float] = []
        records: list[float] = []
        clock = RunClock()
        with RecordWriter(folder) as writer:
            for number in range(self._requests):
                request = self._request(number)
                seen = _seen(request)
                part = experiment.take(_CALLER, request)
                assert part is not None
                messages += self._watch(part, seen)
                begun = self._clock()
                writer.write(record_of(part, seen, clock))
                records.append(self._clock() - begun)
        return messages, records

    def _watch(self, part: Participation, seen: RequestRecord) -> Iterator[float]:
        for event in _events(seen.request):
            seen.saw(event)
            begun = self._clock()
            part.saw(event)
            yield self._clock() - begun
        seen.ended(complete=True)

    def _request(self, number: int) -> Request:
        return Request(request_id=f"team/r{number}", prompt_ids=self._prompt, session=f"s{number % 100}")


@contextmanager
def _running(unit: Unit) -> Iterator[RunningExperiment]:
    plan, problems = make_plan(parse_config(_PLAN.format(unit=unit), "plan"), _INFO)
    assert not problems
    engine = EngineSupervisor(Config(engine=EngineConfig(target="none")))  # never started: nothing is in flight
    client = EngineClient(engine)
    with tempfile.TemporaryDirectory() as folder:
        experiment = RunningExperiment(
            plan, Path(folder), client, RunClock(), {}, lambda state, reason: None, lambda ids: "", Counter()
        )
        try:
            yield experiment
        finally:
            experiment.abandon()
            experiment.flush()


def _events(request: Request) -> Iterator[RequestEvent]:
    yield Started(request.request_id, 1, len(request.prompt_ids), 0, 0.1)
    for number in range(MESSAGES):
        yield Delta(request.request_id, 0, [number, number + 1], "some text")
    stats = SpeculationStats(MESSAGES, MESSAGES - 4, 60, 32, [3, 18, 4, 2, 1])
    usage = Usage(len(request.prompt_ids), 0, 2 * MESSAGES)
    yield Finished(request.request_id, 0, FinishReason.LENGTH, None, usage, stats, Timings())


def _seen(request: Request) -> RequestRecord:
    return RequestRecord(request, None, ServerMetrics(), lambda record: None)


def _stream(request: Request) -> RequestStream:
    stream = RequestStream(request, lambda complete: None)
    stream.record_in(_seen(request))
    return stream


def _giving(stream: RequestStream) -> Submit:
    return lambda principal, request, key: stream


def _summary(seconds: list[float]) -> dict[str, float]:
    found = spread([one * 1e6 for one in seconds])
    return {"p50_us": round(found["p50"], 2), "p99_us": round(found["p99"], 2)}
