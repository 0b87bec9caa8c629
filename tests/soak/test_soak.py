"""Soaks of a server, a short one in the suite and `make soak`, and faults of visits."""

from __future__ import annotations

import asyncio
from pathlib import Path
from random import Random

import httpx
import pytest

from specdec.client.client import Client
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.soak.soak_run import MIB, SoakPlan, Visitor, run_soak
from tests.soak.visits import VISITS, Place, name_of
from tests.soak.watch import Look, Tally

CACHE = Path("~/.cache/specdec").expanduser()


async def test_mixed_load_leaves_nothing_behind() -> None:
    seen: list[Look] = []
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=64 * 64, max_batch=8, max_step_rows=96,
        prefill_chunk=64, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0))
    plan = SoakPlan(minutes=0.04, clients=16, shift_s=1.2, seed=3)
    report = await run_soak(config, plan, lambda look, _: seen.append(look))
    assert report.faults() == []
    assert report.looks == seen != []
    assert not any(look.left for look in seen)
    assert report.answers[0]
    found = report.tally.as_dict()
    assert sum(outcomes.get("ok", 0) for outcomes in found.values()) > 0
    assert set(found) <= {name_of(visit) for visit in VISITS}


def show(look: Look, tally: Tally) -> None:
    sizes = ", ".join(
        f"{name} {use.own_bytes / MIB:.1f} MiB {use.files} files {use.threads} threads"
        for name, use in look.processes.items()
    )
    print(f"{look.visits} visits  {tally.n_faults} faults  {sizes}  held: {look.left}", flush=True)


@pytest.mark.slow
@pytest.mark.model
@pytest.mark.timeout(0)  # a call that hangs is a fault
async def test_long_mixed_load_leaves_nothing_behind(minutes: float) -> None:
    engine = EngineConfig(
        target="smollm2-135m", threads=1, cache_dir=CACHE, kv_tokens=16384,
        # Stores of draft texts grow until they are full; at the default size that takes hours and looks like a leak.
        speculation=SpeculationConfig(shared_tokens=2048),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0))
    report = await run_soak(config, SoakPlan(minutes=minutes), show)
    for visit, outcomes in report.tally.as_dict().items():
        print(f"{visit}: " + ", ".join(f"{count} {outcome}" for outcome, count in outcomes.items()))
    for process in ("frontend", "engine"):
        print(f"{process}: growth {report.growth(process)}")
    assert report.faults() == []


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
