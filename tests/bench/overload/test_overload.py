"""The figures of an overload, from records made by hand and from a real run."""

from __future__ import annotations

import pytest

from bench.frontend.frontend_bench import FACTORY, TOKENIZER
from bench.frontend.paced_engine import paced_target
from bench.local_server import ChildServerError, LocalServer
from bench.overload import (
    Level,
    OverloadPlan,
    goodput,
    judged,
    knee_of,
    measure_overload,
    objective_of,
)
from bench.serve.load import LoadRun, ServeReport
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.load.request import Objective, Record
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


def level(at_once: int, per_s: int, e2e_ms: float = 150.0) -> Level:
    records = [record(i / per_s, e2e_ms - 100) for i in range(per_s * 10)]
    return Level(at_once, report(records, 11.0), 1.0, 9.0)


def test_goodput_is_what_comes_in_time_of_answers_that_were_good() -> None:
    good = [record(i / 10, 50) for i in range(100)]  # 11 tokens each, at +50 and +150 ms
    slow = [record(i / 10, 150) for i in range(100)]
    lost = [Record("f", 2.0, 2.0, 3.0, [2.5], [7], outcome="failed")]
    found = report(good + slow + lost, 10.0)
    assert goodput(found, LIMITS, 2.0, 7.0) == pytest.approx(110)
    assert goodput(found, (), 2.0, 7.0) == pytest.approx(220)
    assert goodput(found, LIMITS, 50.0, 60.0) == 0
    one = report([record(0.0, 50)], 1.0)
    assert goodput(one, LIMITS, 0.0, 0.1) == pytest.approx(10)  # its first token alone
    assert goodput(one, LIMITS, 0.1, 0.2) == pytest.approx(100)  # the others, whose answer began before


def test_the_peak_is_the_least_level_that_gets_as_much_done() -> None:
    levels = [level(4, 50), level(8, 96), level(16, 100), level(32, 99)]
    assert knee_of(levels).at_once == 8
    assert knee_of(levels[2:]).at_once == 16
    assert level(8, 96).requests_per_s == pytest.approx(96, rel=0.02)
    assert level(8, 96).tokens_per_s([Objective("ttft", 1.0)]) == 0


TTFT = LIMITS[0]


def test_figures_of_an_overload() -> None:
    fast = [record(i / 8, 90) for i in range(72)]  # 9 s of answers, 88 tokens a second
    slow = [record(5.0, 150), record(5.0, 50, tpot_ms=30)]
    refused = [refusal(i / 10, 0.5) for i in range(50)] + [refusal(3.0, None)]
    lost = [Record("f", 0.0, 0.0, 1.0, outcome="failed"), Record("c", 0.0, 0.0, 1.0, outcome="cut")]
    found = judged(110.0, report(fast + slow + refused + lost, 12.0), 9.0, TTFT)
    assert found["goodput_over_peak"] == pytest.approx(0.8, rel=0.02)
    assert (found["admitted"], found["refused"], found["refused_without_hint"], found["lost"]) == (76, 51, 1, 2)
    assert found["late_share"] == pytest.approx(4 / 76, abs=1e-4)
    assert found["admitted_p99_over_objective"] is None  # two of 76 were lost


def test_goodput_counts_from_one_deadline_after_the_start() -> None:
    late = report([record(3 + i / 10, 50) for i in range(90)], 12.0)
    found = judged(110.0, late, 12.0, Objective("e2e", 3000.0))
    assert found["goodput_over_peak"] == pytest.approx(1.0, rel=0.02)


@pytest.mark.parametrize(("objective", "share"), [(LIMITS[0], 0.9), (LIMITS[1], 0.25)])
def test_the_p99_of_admitted_requests(objective: Objective, share: float) -> None:
    flood = report([record(i / 10, 90, tpot_ms=5) for i in range(198)] + [record(3.0, 150), record(4.0, 160)], 20.0)
    assert judged(110.0, flood, 20.0, objective)["admitted_p99_over_objective"] == share


def test_the_objective_follows_the_peak() -> None:
    peak = report([record(i / 10, 50 + i) for i in range(100)], 10.0)
    assert str(objective_of(peak)) == "e2e:496"


async def test_a_whole_run_asks_no_prompt_twice() -> None:
    """The paced engine has no limit, so nothing is overloaded; but all parts of the benchmark run."""
    config = Config(engine=EngineConfig(target=paced_target(2.0)), server=ServerConfig(grpc_port=0, http_port=None))
    plan = OverloadPlan(levels=(1, 2), peak_s=0.4, settle_s=0.1, factor=2.0, minutes=0.02, max_tokens=8)
    notes: list[str] = []
    found = await measure_overload(config, plan, notes.append, factory=FACTORY, tokenizer=TOKENIZER)
    assert set(found["peak"]["tokens_per_s_by_level"]) == {"1", "2"}
    assert found["peak"]["good_tokens_per_s"] > 0
    assert found["admitted"] + found["refused"] == found["overload"]["requests"]["sent"]
    assert found["refused_without_hint"] == 0
    assert found["plan"]["objective"].startswith("e2e:")
    assert "peak" in notes[-1]


async def test_a_server_in_a_process_of_its_own() -> None:
    config = Config(engine=EngineConfig(target="paced:1"), server=ServerConfig(grpc_port=0, http_port=None))
    server = LocalServer(config, factory=FACTORY, tokenizer=TOKENIZER)
    async with server:
        assert server.grpc_port > 0
        assert min(server.memory_bytes().values()) > 1 << 20
        process, engine = server.frontend, server.engine
    assert not process.is_running()
    assert not engine.is_running()


async def test_a_server_that_can_not_start_says_why() -> None:
    config = Config(engine=EngineConfig(target="no/such-model"), server=ServerConfig(grpc_port=0, http_port=None))
    with pytest.raises(ChildServerError, match="such-model"):
        async with LocalServer(config, factory="tests.fake_engine:unavailable"):
            pass
