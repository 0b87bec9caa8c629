"""The verdict on a flooded server, from records made by hand, and from a server that is flooded."""

from __future__ import annotations

import pytest

from bench.local_server import LocalServer, LocalServerError
from bench.overload.memory_watch import MemoryWatch
from bench.overload.overload_bench import deadline_of, judged, objectives_of
from bench.overload.overload_plan import OverloadPlan
from bench.serve.load_run import LoadRun
from bench.serve.objective import Objective
from bench.serve.record import Record
from bench.serve.serve_report import ServeReport
from specdec.config import Config, EngineConfig, ServerConfig
from tests.bench.serve.fake_server import FakeServer

LIMITS = (Objective("ttft", 100.0), Objective("tpot", 20.0))


def record(due_s: float, ttft_ms: float, tpot_ms: float = 10.0, tokens: int = 11) -> Record:
    first = due_s + ttft_ms / 1e3
    end = first + tpot_ms * (tokens - 1) / 1e3
    return Record("r", due_s, due_s, end, [first, end], [1, tokens - 1], 5, 0, tokens)


def refusal(due_s: float, hint: float | None) -> Record:
    return Record("x", due_s, due_s, due_s + 0.001, outcome="refused", retry_after_s=hint)


def report(records: list[Record], seconds: float) -> ServeReport:
    run = LoadRun(FakeServer())
    run.records, run.started_s, run.ended_s = records, 0.0, seconds
    return ServeReport(run, objectives=LIMITS)


def test_the_four_questions() -> None:
    peak = report([record(i / 10, 50) for i in range(100)], 10.0)
    fast = [record(i / 8, 90) for i in range(72)]  # 9 s of answers
    slow = [record(5.0, 150), record(5.0, 50, tpot_ms=30)]
    late = [record(9.95, 90)]  # good, but what is left when nobody asks any more does not count
    refused = [refusal(i / 10, 0.5) for i in range(50)] + [refusal(3.0, None)]
    lost = [Record("f", 0.0, 0.0, 1.0, outcome="failed"), Record("c", 0.0, 0.0, 1.0, outcome="cut")]
    found = judged(peak, report(fast + slow + late + refused + lost, 12.0), 10.0)
    assert found["goodput_over_peak"] == pytest.approx(0.72)
    assert (found["refused"], found["refused_without_hint"], found["lost"]) == (51, 1, 2)
    assert found["admitted_p99_over_objective"] == {"ttft:100": None, "tpot:20": None}  # two of 77 were lost


def test_the_p99_of_admitted_requests() -> None:
    peak = report([record(i / 10, 50) for i in range(100)], 10.0)
    flood = report([record(i / 10, 90, tpot_ms=5) for i in range(198)] + [record(3.0, 150), record(4.0, 160)], 20.0)
    assert judged(peak, flood, 20.0)["admitted_p99_over_objective"] == {"ttft:100": 0.9, "tpot:20": 0.25}


def test_objectives_follow_the_peak() -> None:
    peak = report([record(i / 10, 50 + i) for i in range(100)], 10.0)
    (limit,) = objectives_of(peak)
    assert str(limit) == "e2e:496"
    assert deadline_of(OverloadPlan(), [limit, *LIMITS]) == 0.496
    assert deadline_of(OverloadPlan(deadline_s=3.0), [limit]) == 3.0
    assert deadline_of(OverloadPlan(), LIMITS) is None


def test_growth_is_between_the_second_quarter_and_the_last() -> None:
    watch = MemoryWatch(LocalServer(Config()))
    assert watch.growth_mib() == {}
    sizes = [100, 300, 500, 500, 500, 500, 501, 501]  # at first the arenas fill
    watch.samples = [(float(i), {"engine": size << 20, "frontend": 7}) for i, size in enumerate(sizes)]
    assert watch.growth_mib() == {"engine": 1.0, "frontend": 0.0}


async def test_a_server_in_a_process_of_its_own() -> None:
    config = Config(engine=EngineConfig(target="paced:1"), server=ServerConfig(grpc_port=0, http_port=None))
    server = LocalServer(
        config, factory="bench.frontend.paced_engine:build", tokenizer="bench.frontend.byte_tokenizer:ByteTokenizer"
    )
    async with server:
        assert server.grpc_port > 0
        assert min(server.memory_bytes().values()) > 1 << 20
        process, engine = server.frontend, server.engine
        async with MemoryWatch(server) as watch:
            while not watch.samples:
                await _moment()
    assert not process.is_running()
    assert not engine.is_running()


async def test_a_server_that_can_not_start_says_why() -> None:
    config = Config(engine=EngineConfig(target="no/such-model"), server=ServerConfig(grpc_port=0, http_port=None))
    with pytest.raises(LocalServerError, match="such-model"):
        async with LocalServer(config, factory="tests.bench.overload.no_engine:build"):
            pass


async def _moment() -> None:
    import asyncio

    await asyncio.sleep(0.01)
