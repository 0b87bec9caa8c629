"""A short soak of a real engine with random weights, and faults of visits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx

from bench.soak.soak_bench import SoakPlan, SoakReport, Visitor, run_soak
from bench.soak.visits import VISITS, Place, name_of
from bench.soak.watch import Look, Tally
from specdec.client.client import Client
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig

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
    assert not any(look.left for look in seen)
    assert report.answers[0]
    found = report.as_dict()["outcomes"]
    assert sum(outcomes.get("ok", 0) for outcomes in found.values()) > 0
    assert set(found) <= {name_of(visit) for visit in VISITS}


async def test_a_visit_that_breaks_or_hangs_is_a_fault() -> None:
    async def breaks(place: Place) -> str:
        raise ValueError("no JSON")

    async def hangs(place: Place) -> str:
        await asyncio.Event().wait()
        return "never"

    tally = Tally()
    place = Place(0, Client("127.0.0.1:1"), httpx.AsyncClient(), 1, 1, "", Random(0))
    for visit in (breaks, hangs):
        await Visitor(place, tally, 0.01).pay(visit)
    assert list(tally.faults) == ["breaks: ValueError: no JSON", "hangs: it did not end within 0.01 s"]


def test_every_visit_has_a_name_of_its_own() -> None:
    assert len({name_of(visit) for visit in VISITS}) == len(VISITS)
    tally = Tally()
    for visit in VISITS:
        tally.add(name_of(visit), "ok")
    assert tally.visits == len(tally.as_dict()) == len(VISITS)
