"""A client's switchback: arms of blocks, washout, and resumption after a kill."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from server.experiment.assignment import paired_arms
from server.experiment.records import ExperimentError
from specdec.load.request import LoadRequest
from tests.bench.experiment.fake_arm import FakeArm, KilledError, lognormal
from tests.bench.experiment.plays import logged, plan, play, result

BLOCK_S, WASHOUT_S, RATE = 10.0, 2.0, 5.0


def switchback(blocks: int = 16, **fields: Any) -> Any:
    return plan(
        **{
            "assignment": {"mode": "switchback", "block_s": BLOCK_S, "washout_s": WASHOUT_S},
            "load": {"workload": "chat", "rate": RATE},
            "stopping": {"max_duration": blocks * BLOCK_S},
        }
        | fields
    )


def test_every_two_blocks_hold_both_arms() -> None:
    arm_of = paired_arms("salt", "a", "b")
    assert all({arm_of(2 * i), arm_of(2 * i + 1)} == {"a", "b"} for i in range(100))
    assert len({arm_of(2 * i) for i in range(100)}) == 2


def test_a_run(tmp_path: Path) -> None:
    """Answers take longer than the washout, and some end during the next block."""
    a, b = (FakeArm(lambda ask, f=f: 3.0 * f * lognormal(0.2, ask.salt)) for f in (1.0, 0.5))  # type: ignore[misc]
    config = switchback(warmup_requests=3)
    play(tmp_path, config, a, b)
    arm_of = paired_arms(config.name, config.control, config.treatment)
    records = logged(tmp_path).records
    counted = [record for record in records if record.block >= 0]
    assert len(records) - len(counted) == 6
    assert len(a.asked) + len(b.asked) == len(records) == len({record.request for record in records})
    assert {record.block for record in counted} == set(range(16))
    for record in counted:
        assert record.arm == arm_of(record.block)
        assert record.scheduled == pytest.approx(record.arrival, abs=1e-9)
    found = result(tmp_path)
    assert found.sample_ratio_counts == (8, 8)
    assert found.verdict.kind == "better"
    assert found.primary.ratio == pytest.approx(0.5, abs=0.05)


def test_what_begins_a_block_is_washed_out(tmp_path: Path) -> None:
    config = switchback(load={"workload": "chat", "rate": RATE, "arrivals": "constant"}, stopping={"max_duration": 40})
    play(tmp_path, config, FakeArm(), FakeArm())
    by_block: dict[int, list[bool]] = {}
    for record in sorted(logged(tmp_path).records, key=lambda r: r.arrival):
        by_block.setdefault(record.block, []).append(record.warm_up)
    assert by_block == {block: [True] * 10 + [False] * 40 for block in range(4)}


def test_one_that_was_broken_off_goes_on_with_the_next_block(tmp_path: Path) -> None:
    config = switchback(8)

    def stop(ask: LoadRequest) -> bool:
        if ask.name == "000120":
            raise KilledError
        return False

    broken = FakeArm(), FakeArm()
    for arm in broken:
        arm._fails = stop
    with pytest.raises(ExceptionGroup):
        play(tmp_path, config, *broken)
    before = {record.request for record in logged(tmp_path).records}
    blocks = {record.block for record in logged(tmp_path).records}
    assert blocks == set(range(len(blocks)))
    a, b = FakeArm(), FakeArm()
    play(tmp_path, config, a, b)
    records = logged(tmp_path).records
    assert len(a.asked) + len(b.asked) == len(records) - len(before)
    assert {record.block for record in records} == set(range(8))
    whole = tmp_path / "whole"
    play(whole, config, FakeArm(), FakeArm())
    assert {(r.workload, r.arm) for r in records} == {(r.workload, r.arm) for r in logged(whole).records}
    assert len(records) == len(logged(whole).records)


def test_a_block_that_had_not_ended_is_played_again(tmp_path: Path) -> None:
    """A request of block 1 is still running when block 3 breaks off."""

    def took(ask: LoadRequest) -> float:
        return 100.0 if ask.name == "000060" else 0.2

    def stop(ask: LoadRequest) -> bool:
        if ask.name == "000190":
            raise KilledError
        return False

    config = switchback(8)
    with pytest.raises(ExceptionGroup):
        play(tmp_path, config, FakeArm(took, fails=stop), FakeArm(took, fails=stop))
    before = logged(tmp_path).records
    blocks = {record.block for record in before}
    assert 1 not in blocks
    assert max(blocks) > 1
    a, b = FakeArm(), FakeArm()
    play(tmp_path, config, a, b)
    records = logged(tmp_path).records
    assert {record.block for record in records} == set(range(8))
    assert len(a.asked) + len(b.asked) == len(records) - len(before)


def test_servers_that_are_gone_end_the_run(tmp_path: Path) -> None:
    arms = [FakeArm(fails=lambda ask: True) for _ in range(2)]
    with pytest.raises(ExperimentError, match=r"the servers no longer answer \(broken\)"):
        play(tmp_path, switchback(), *arms)
    assert {record.block for record in logged(tmp_path).records} == {0, 1, 2}
