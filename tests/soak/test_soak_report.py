"""The faults of a soak, from samples made by hand."""

from __future__ import annotations

import dataclasses
import random
from typing import Any

import pytest

from tests.soak.soak_run import MIB, SoakPlan, SoakReport
from tests.soak.watch import Look, Tally, Use

HELD = {"requests_in_flight": 0, "kv_pages_used": 0}


def looks(count: int = 30, **engine: Any) -> list[Look]:
    """A sample per minute; ``engine``: by field, a function of the minute."""
    found = []
    for minute in range(count):
        use = {"own_bytes": 300 * MIB, "files": 40, "threads": 9} | {k: int(f(minute)) for k, f in engine.items()}
        processes = {"frontend": Use(150 * MIB, 60, 12), "engine": Use(**use)}
        found.append(Look(minute * 60.0, minute * 100, processes, dict(HELD), 0, 0))
    return found


def report(found: list[Look], tally: Tally | None = None, answers: tuple[str, ...] = ("a", "a")) -> SoakReport:
    return SoakReport(SoakPlan(), tally or Tally(), found, answers)


def test_a_server_that_gives_all_back_is_well() -> None:
    noise = random.Random(1)
    found = report(looks(own_bytes=lambda minute: (300 + min(minute, 8) * 20 + noise.uniform(-2, 2)) * MIB))
    assert found.faults() == []
    grown = found.growth("engine")
    assert grown is not None
    assert abs(grown["mib"]) < 2


@pytest.mark.parametrize(
    ("engine", "fault"),
    [
        ({"own_bytes": lambda minute: (300 + minute) * MIB}, "engine: memory grew by 19.0 MiB"),
        ({"files": lambda minute: 40 + minute}, "engine: files at rest grew from 59 to 69"),
        ({"threads": lambda minute: 9 + 3 * (minute > 25)}, "engine: threads at rest grew from 9 to 12"),
    ],
)
def test_growth_is_a_fault(engine: dict[str, Any], fault: str) -> None:
    (found,) = report(looks(**engine)).faults()
    assert found.startswith(fault)


def test_what_is_held_at_rest_is_named() -> None:
    found = looks(4)
    found[2] = dataclasses.replace(found[2], held=HELD | {"kv_pages_used": 3}, calls=1)
    (fault,) = report(found).faults()
    assert "shift 3" in fault
    assert "{'kv_pages_used': 3, 'calls': 1}" in fault


def test_an_engine_that_died_and_other_answers_and_faults_of_visits_are_named() -> None:
    found = looks(3)
    found[2] = dataclasses.replace(found[2], restarts=2)
    tally = Tally()
    for _ in range(4):
        tally.fault("grpc gap", "INTERNAL: it broke")
    tally.add("grpc gap", "ok")
    assert (tally.visits, tally.n_faults) == (5, 4)
    faults = report(found, tally, ("a", "b", "a")).faults()
    assert faults[0] == "4 x grpc gap: INTERNAL: it broke"
    assert "restarted 2 times" in faults[1]
    assert "2 different answers: ['a', 'b']" in faults[2]


def test_too_few_looks_are_not_judged() -> None:
    assert report(looks(8, own_bytes=lambda minute: minute * 100 * MIB)).growth("engine") is None


def test_one_outlier_does_not_move_the_growth() -> None:
    found = report(looks(own_bytes=lambda minute: (300 + minute + 900 * (minute == 20)) * MIB)).growth("engine")
    assert found is not None
    assert found["mib_per_hour"] == pytest.approx(60)
