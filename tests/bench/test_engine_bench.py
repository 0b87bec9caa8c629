"""The benchmark's figures with an engine whose steps take known times."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import pytest

from bench.engine_bench import (
    BenchError,
    EngineBench,
    EngineRunner,
    WorkloadRuns,
    check_same_output,
    run_interleaved,
)
from bench.engine_runs import AUTO, FIXED_GRID, OFF, GroupRun, RequestRun, Setting
from bench.engine_session import best_fixed, fixed_figures
from bench.workloads.workload import Workload, uncounted
from specdec.core.types import RequestEvent, SamplingParams, SpeculationMode
from specdec.engine.engine import Engine
from specdec.load.request import LoadRequest
from tests.bench.fake_engine import FakeEngine

GREEDY = SamplingParams(temperature=0.0)


def prompt(number: int, tokens: int = 13, **fields: Any) -> LoadRequest:
    return LoadRequest(f"p{number}", tokens, ids=(1000 * number, 7), **fields)


def one_by_one(prompts: list[LoadRequest]) -> Workload:
    return Workload("w", tuple((prompt,) for prompt in prompts))


def runner(engine: FakeEngine) -> EngineRunner:
    return EngineRunner(cast(Engine, engine), GREEDY, engine.clock)


def run_alone(
    engine: FakeEngine, group: list[LoadRequest], arm: Setting, salt: str, at_once: int | None = None
) -> GroupRun:
    run = runner(engine).start(group, arm, salt, at_once)
    run_interleaved([run])
    return run.result()


@dataclass
class Bench:
    """A benchmark whose arms have fake engines."""

    arms: tuple[Setting, ...] = ()
    fields: dict[str, Any] = field(default_factory=dict)
    said: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.engines = {arm: FakeEngine(**self.fields) for arm in (OFF, AUTO, *self.arms)}
        self.made = EngineBench(cast(dict[Setting, Engine], self.engines), GREEDY, self.said.append)
        self.made._runners = {arm: runner(engine) for arm, engine in self.engines.items()}

    def run(self, workload: Workload) -> WorkloadRuns:
        return WorkloadRuns(workload.name, workload.concurrent, list(self.made.rounds(workload)))


def test_time_per_token_is_of_decode_steps_only() -> None:
    run = run_alone(FakeEngine(), [prompt(1)], OFF, "s").requests[0]
    assert run.tokens == list(range(1000, 1013))
    assert (run.decode_s, run.gaps, run.tpot_ms, run.first_tokens) == (12.0, 12, 1000.0, 1)
    # 4 tokens come with the prefill, 9 in three steps of 2 s.
    run = run_alone(FakeEngine(), [prompt(1)], AUTO, "s").requests[0]
    assert (run.decode_s, run.tpot_ms, run.stats.num_steps, run.first_tokens) == (6.0, 500.0, 4, 4)


def test_too_few_tokens_or_all_in_the_first_step_are_not_timed() -> None:
    assert run_alone(FakeEngine(), [prompt(1, 3)], OFF, "s").requests[0].tpot_ms is None
    assert run_alone(FakeEngine(), [prompt(1, 4)], OFF, "s").requests[0].tpot_ms == 1000.0
    assert run_alone(FakeEngine(), [prompt(1, 4)], AUTO, "s").requests[0].tpot_ms is None


def test_a_group_runs_at_once_with_its_prompts_prefilled_before() -> None:
    engine = FakeEngine()
    group = run_alone(engine, [prompt(1), prompt(2)], AUTO, "s")
    assert [r.stopping.max_tokens for r in engine.seen] == [0, 0, 13, 13]
    assert {r.speculation.mode for r in engine.seen[:2]} == {SpeculationMode.OFF}
    assert {r.cache_salt for r in engine.seen} == {"s"}
    assert sum(len(request.tokens) for request in group.requests) == 26
    assert group.tokens_per_s == pytest.approx(26 / 206)


def test_a_closed_loop_keeps_so_many_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine()
    at_once: list[int] = []
    step = FakeEngine.step

    def watched(engine: FakeEngine) -> list[RequestEvent]:
        at_once.append(len(engine._running))
        return step(engine)

    monkeypatch.setattr(FakeEngine, "step", watched)
    monkeypatch.setattr(EngineRunner, "_prefill", lambda self, requests: None)
    group = run_alone(engine, [prompt(i) for i in range(1, 6)], AUTO, "s", 2)
    assert at_once == [2] * 10 + [1] * 5
    assert [run.prompt for run in group.requests] == [prompt(i).name for i in range(1, 6)]
    # Two and two together, then the last: prefill (2 x 100 s), three steps of 2 s each.
    assert sum(len(request.tokens) for request in group.requests) == 5 * 13
    # The fifth has no neighbour: that is not what two at once do.
    assert (group.full_s, group.full_tokens) == (2 * (2 * 100.0 + 3 * 2.0), 4 * 13)
    assert group.tokens_per_s == pytest.approx(52 / 412)


def test_what_a_prompt_says_reaches_the_engine() -> None:
    engine = FakeEngine()
    run_alone(engine, [prompt(1, prediction=(5, 6), session="file.py")], FIXED_GRID[-1], "w/arm")
    (request,) = engine.seen
    assert (request.prediction_ids, request.session, request.cache_salt) == ((5, 6), "w/arm/file.py", "w/arm")
    assert (request.speculation.mode, request.sampling) == (SpeculationMode.ON, GREEDY)
    assert (request.speculation.max_depth, request.speculation.width, request.speculation.max_nodes) == (6, 3, 15)


def test_an_engine_that_fails_stops_the_benchmark() -> None:
    with pytest.raises(BenchError, match=r"p1.*MODEL_BROKEN"):
        run_alone(FakeEngine(failing=True), [prompt(1)], OFF, "s")


@pytest.mark.parametrize("wrong", [SpeculationMode.AUTO, SpeculationMode.OFF])
def test_other_tokens_in_an_arm_stop_the_benchmark(wrong: SpeculationMode) -> None:
    made = Bench(fields={"wrong": wrong})
    with pytest.raises(BenchError, match=r"w, p1: auto returned other tokens than off, first at 12 .*path identity"):
        made.run(one_by_one([prompt(1)]))


def test_a_text_that_only_ends_earlier_is_another_text() -> None:
    long, short = (
        GroupRun((RequestRun("p", [1, 2, 3]),), 1.0, 3),
        GroupRun((RequestRun("p", [1, 2]),), 1.0, 2),
    )
    check_same_output("w", {"off": long, "auto": long})
    with pytest.raises(BenchError, match="first at 2"):
        check_same_output("w", {"off": long, "auto": short})


def test_every_arm_has_an_engine_and_a_salt_of_its_own() -> None:
    made = Bench()
    made.run(one_by_one([*uncounted([prompt(9)]), *map(prompt, range(1, 5))]))
    for arm, engine in made.engines.items():
        assert {(r.speculation, r.cache_salt) for r in engine.seen} == {(arm.speculation, f"w/{arm.name}")}
        assert [r.prompt_ids[0] for r in engine.seen] == [9000, 1000, 2000, 3000, 4000]
    assert made.said[0] == "w: warming up with p9"
    assert made.said[1] == "w 1/4: off 1000.0, auto 500.0"


def test_arms_keep_abreast_by_the_time_they_took() -> None:
    """Three steps of 1 s run for each step of 3 s, so that changes of the machine affect both arms."""
    steps: list[str] = []
    runs = []
    for name, spec_step_s in (("slow", 3.0), ("fast", 1.0)):
        engine = FakeEngine(run=1, spec_step_s=spec_step_s)
        run = runner(engine).start([prompt(1, 40)], AUTO, name)
        take = run.step

        def step(name: str = name, take: Callable[[], None] = take) -> None:
            steps.append(name)
            take()

        run.step = step  # type: ignore[method-assign]
        runs.append(run)
    run_interleaved(runs)
    assert [run.done for run in runs] == [True, True]
    assert (steps.count("slow"), steps.count("fast")) == (41, 41)
    decoding = steps[steps.index("fast", 2) + 1 :]  # behind both prefills
    while_both = decoding[: len(decoding) - decoding[::-1].index("fast")]
    assert 13 <= while_both.count("slow") <= 15
    assert all(while_both[i : i + 5].count("slow") in (1, 2) for i in range(len(while_both) - 5))


def test_summary_of_a_workload() -> None:
    made = Bench()
    lengths = (13, 13, 5, 2)  # ratios 2, 2, 4 / 2 = 2 and none
    runs = made.run(one_by_one([prompt(i, n) for i, n in enumerate(lengths)]))
    made.engines[AUTO].spec_step_s = 8.0
    runs.rounds += made.run(one_by_one([prompt(8)])).rounds  # 12 s against 24
    found = runs.summary()
    assert (found["prompts"], found["timed"], found["ratio_worst"], found["worst_prompt"]) == (5, 4, 0.5, "p8")
    assert found["ratio_median"] == 2.0
    assert found["off_ms_per_token"] == pytest.approx((12 * 3 + 4 + 1) / 41 * 1e3)
    assert found["auto_ms_per_token"] == pytest.approx((6 * 2 + 2 + 24) / 41 * 1e3)
    assert found["ratio_total"] == pytest.approx(41 / 38, abs=1e-4)
    assert found["tokens_per_step"] == pytest.approx(46 / (4 * 3 + 2 + 1), abs=1e-4)
    assert found["drafters"]["suffix"]["acceptance"] == 0.5
    rows = json.loads(json.dumps(runs.as_dict()))
    assert [row["ratio"] for row in rows] == [2.0, 2.0, 2.0, None, 0.5]
    assert rows[0]["arms"]["auto"]["by_drafter"] == {"suffix": [18, 9]}


def test_summary_without_anything_to_time() -> None:
    made = Bench()
    found = made.run(one_by_one([prompt(1, 1)])).summary()
    assert [found[name] for name in ("timed", "ratio_median", "ratio_worst", "ratio_total")] == [0, None, None, None]
    assert made.said == ["w 1/1: too short to time"]
    json.dumps(found, allow_nan=False)


def test_summary_of_requests_at_once_compares_the_rate_of_all() -> None:
    made = Bench()
    workload = Workload("c", ((prompt(1), prompt(2)),))
    found = made.run(workload).summary()
    off, auto = 26 / (200 + 12), 26 / 206
    assert found["off_tokens_per_s"] == pytest.approx(off, abs=1e-4)
    assert found["auto_tokens_per_s"] == pytest.approx(auto, abs=1e-4)
    assert found["ratio_total"] == pytest.approx(212 / 206, abs=1e-4)
    assert "tokens/s" in made.said[0]


def test_best_fixed_setting_is_compared_with_auto() -> None:
    """The time by which a fixed setting's first token was later than plain decoding's counts."""
    made = Bench(FIXED_GRID)
    runs = made.run(one_by_one([prompt(1)]))
    for name, by_arm in runs.rounds[0].items():
        run = by_arm.requests[0]
        run.first_s = 9.0 if name == "8x1" else 2.0
        run.decode_s = {"off": 12.0, "auto": 6.0, "6x3/15": 3.0, "8x1": 1.0}.get(name, 9.0)
    fixed = tuple(arm.name for arm in FIXED_GRID)
    assert len(set(fixed)) == 7
    assert fixed_figures(runs, fixed)["6x3/15"] == 250.0
    assert best_fixed(runs, fixed) == {"setting": "6x3/15", "ms_per_token": 250.0, "over_auto": 0.5}
