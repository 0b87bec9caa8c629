"""Four times the capacity of an engine: its goodput stays close to its peak."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from random import Random

import pytest

from server.admission import Admission
from tests.server.admission.simulated_engine import Costs, Job, SimulatedEngine

TOKENS, FACTOR, ROOM = 32, 4.0, 2.0
BATCH_BOUND = Costs(prompt_row_s=0.0001, row_s=0.0005)
PROMPT_BOUND = Costs()
JUMPY = Costs(accepted=8, chance=0.7)


@dataclass
class Flooded:
    """``goodput``: good tokens per second over the peak's."""

    goodput: float
    late: float
    refused: int
    hints: list[float]


async def peak(costs: Costs, seed: int) -> tuple[float, float, float]:
    """Tokens and requests per second of a closed loop with twice as many clients as run concurrently... and the p99 of
    a full one."""
    engine, draw = SimulatedEngine(costs, seed), Random(seed)
    while engine.clock.now < 1120.0:
        while len(engine.running) + len(engine.waiting) < costs.batch:
            engine.ask(draw.randrange(80, 240), TOKENS)
        await engine.step()
    done = [job for job in engine.jobs if job.ended_s is not None]
    times = sorted(job.ended_s - job.came_s for job in done if job.ended_s is not None)
    tokens = good_tokens(done, 1020.0, 1120.0, 1e9) / 100.0
    return tokens, tokens / TOKENS, times[int(len(times) * 0.99)]


def good_tokens(jobs: list[Job], begin_s: float, end_s: float, limit_s: float) -> int:
    """Tokens that arrived between two times, of answers within the limit."""
    return sum(
        count
        for job in jobs
        if job.ended_s is not None and job.ended_s - job.came_s <= limit_s
        for at_s, count in job.times
        if begin_s <= at_s < end_s
    )


async def flood(costs: Costs, seed: int) -> Flooded:
    tokens, rate, p99_s = await peak(costs, seed)
    limit_s = ROOM * p99_s
    engine, draw = SimulatedEngine(costs, seed), Random(seed + 1)
    due_s = engine.clock.now
    while engine.clock.now < 1120.0:
        while due_s <= engine.clock.now:
            engine.ask(draw.randrange(80, 240), TOKENS, limit_s)
            due_s += draw.expovariate(rate * FACTOR)
        await engine.step()
    good = good_tokens(engine.jobs, 1020.0, 1120.0, limit_s) / 100.0
    over = [job for job in engine.jobs if 1000.0 + limit_s <= job.came_s < 1120.0 - limit_s]
    late = sum(job.ended_s is None or job.ended_s - job.came_s > limit_s for job in over) / len(over)
    return Flooded(good / tokens, late, len(engine.refused), [error.retry_after_s for error in engine.refused])


@pytest.mark.parametrize("costs", [BATCH_BOUND, PROMPT_BOUND, JUMPY], ids=["batch", "prompt", "jumpy"])
def test_goodput_stays_near_the_peak(costs: Costs) -> None:
    found = asyncio.run(flood(costs, 1))
    assert found.goodput >= 0.9
    assert found.late <= 0.01
    assert found.refused > 0
    assert min(found.hints) > 0


@pytest.mark.parametrize("costs", [BATCH_BOUND, PROMPT_BOUND, JUMPY], ids=["batch", "prompt", "jumpy"])
def test_a_server_that_starts_under_overload_finds_its_rates_though_all_are_late(costs: Costs) -> None:
    """Their deadline is half the time that an answer takes in a full batch."""

    async def cold() -> SimulatedEngine:
        _, rate, p99_s = await peak(costs, 1)
        engine, draw = SimulatedEngine(costs, 1), Random(2)
        due_s = begin_s = engine.clock.now
        while engine.clock.now < begin_s + 60.0:
            while due_s <= engine.clock.now:
                engine.ask(draw.randrange(80, 240), TOKENS, 0.5 * p99_s)
                due_s += draw.expovariate(rate * FACTOR)
            await engine.step()
        return engine

    engine = asyncio.run(cold())
    answered = sum(job.ended_s is not None for job in engine.jobs)
    assert answered > len(engine.jobs) / 2
    assert len(engine.refused) > len(engine.jobs)


def test_without_admission_hardly_any_request_meets_its_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """The simulation can fail."""
    monkeypatch.setattr(Admission, "_check_time", lambda *_: None)
    assert asyncio.run(flood(PROMPT_BOUND, 1)).goodput < 0.5
