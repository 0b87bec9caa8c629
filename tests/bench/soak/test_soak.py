"""A short soak of a real engine with random weights; clocks and limits on their own."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from bench.soak import soak_bench
from bench.soak.soak_bench import SoakPlan, SoakReport, run_soak
from bench.soak.visits import VISITS, Place, name_of
from bench.soak.watch import Look, RunningTime, SoakFault, Tally, within
from specdec.client.client import Client
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.bench.virtual_loop import VirtualLoop, run_virtually

CACHE = Path("~/.cache/specdec").expanduser()


async def soak(plan: SoakPlan, seen: list[Look]) -> SoakReport:
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=64 * 64, max_batch=8, max_step_rows=96,
        prefill_chunk=64, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0))
    return await run_soak(config, plan, lambda look, _: seen.append(look))


async def test_mixed_load_leaves_nothing_behind() -> None:
    seen: list[Look] = []
    plan = SoakPlan(minutes=0.04, clients=16, shift_s=1.2, seed=3)
    report = await soak(plan, seen)
    assert report.faults() == []
    assert report.looks == seen != []
    assert all(look.at_rest for look in seen)
    assert report.answers[0]
    found = report.as_dict()["outcomes"]
    assert sum(outcomes.get("ok", 0) for outcomes in found.values()) > 0
    assert set(found) <= {name_of(visit) for visit in VISITS}


async def test_what_does_not_end_is_a_fault() -> None:
    with pytest.raises(SoakFault, match="the call did not end within"):
        await within(asyncio.Event().wait(), 0.01, "the call")
    assert await within(asyncio.sleep(0, "done"), 5, "it") == "done"


def test_time_in_which_the_process_is_stopped_does_not_count() -> None:
    async def run() -> tuple[float, int, str]:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualLoop)
        async with RunningTime() as clock:
            await asyncio.sleep(10)
            slow = asyncio.create_task(within(asyncio.sleep(400, "done"), 300, "it"))
            await asyncio.sleep(1)
            loop.block(10_000)
            result = await slow
            return clock.running_s, clock.stops, result

    running_s, stops, result = run_virtually(run())
    assert stops == 1
    assert result == "done"
    assert 10 < running_s < 20


async def test_a_visit_that_breaks_is_a_fault_unless_the_process_was_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(place: Place) -> str:
        raise ValueError("no JSON")

    monkeypatch.setattr(soak_bench, "VISITS", {breaks: 1})
    monkeypatch.setattr(soak_bench, "TICK_S", 0.0)
    clock, tally = RunningTime(), Tally()
    place = Place(0, Client("127.0.0.1:1"), httpx.AsyncClient(), 1, 1, "", Random(0))
    one = soak_bench.Visitor(place, tally, clock, 5.0)
    await one._pay(breaks)
    assert list(tally.faults) == ["breaks: ValueError: no JSON"]
    paying = asyncio.create_task(one._pay(breaks))
    await asyncio.sleep(0)
    clock.stops += 1
    await paying
    assert (tally.n_faults, tally.outcomes["breaks", soak_bench.EXCUSED]) == (1, 1)


def test_every_visit_has_a_name_of_its_own() -> None:
    assert len({name_of(visit) for visit in VISITS}) == len(VISITS)
    tally = Tally()
    for visit in VISITS:
        tally.add(name_of(visit), "ok")
    assert tally.visits == len(tally.as_dict()) == len(VISITS)
