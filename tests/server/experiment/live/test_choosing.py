"""Which arm a request gets in each mode."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from server.auth.principal import ANYBODY, Principal
from server.engine_client import EngineClient
from server.errors import SwapUnderWayError
from server.experiment.assignment import bucket, digest
from server.experiment.config import Unit
from server.experiment.live.choosing import BlockChooser, EngineSwitch, KeyChooser, unit_key
from server.experiment.live.plan import EngineSettings
from server.experiment.records import NO_BLOCK
from specdec.core.types import Request

ADA, BOB = Principal("ada", "team"), Principal("bob", "other")
HALVES = {"a": 1.0, "b": 1.0}


def request(number: int = 0, session: str = "", prompt: tuple[int, ...] = (1, 2)) -> Request:
    return Request(request_id=f"r{number}", prompt_ids=prompt, session=session)


def chooser(block_s: float, washout_s: float, now: Callable[[], float], **options: bool) -> BlockChooser:
    return BlockChooser("salt", ("a", "b"), block_s, washout_s, now, **options)


@pytest.mark.parametrize("unit", ["session", "user", "prompt"])
def test_a_unit_keeps_its_arm(unit: Unit) -> None:
    arms = set()
    for fresh in range(20):  # another chooser each time: nothing is remembered
        chooser = KeyChooser("salt", unit, HALVES, 1.0)
        found = chooser.choose(ADA, request(fresh, "s"))
        assert found is not None
        arms.add(found)
    assert len(arms) == 1
    assert arms.pop().key


def test_by_request_each_request_has_its_own_arm_and_no_key_is_stored() -> None:
    chooser = KeyChooser("salt", "request", HALVES, 1.0)
    found = [chooser.choose(ANYBODY, request(i)) for i in range(400)]
    counts = Counter(choice.arm for choice in found if choice is not None)
    assert 140 < counts["a"] < 260
    assert counts["a"] + counts["b"] == 400
    assert {choice.key for choice in found if choice is not None} == {""}
    for i, choice in enumerate(found):
        assert choice is not None
        assert choice.arm == ("a" if bucket("salt", f"r{i}") < 5000 else "b")


def test_keys_are_scoped_to_their_tenant_and_reveal_nothing() -> None:
    one, other = (unit_key("session", who, request(session="s")) for who in (ADA, BOB))
    assert one != other
    choice = KeyChooser("salt", "session", HALVES, 1.0).choose(ADA, request(session="s"))
    assert choice is not None
    assert choice.key == digest("salt", "team/s").hex()


def test_a_request_without_the_key_takes_no_part() -> None:
    for unit, who in (("session", ADA), ("user", ANYBODY)):
        assert KeyChooser("salt", unit, HALVES, 1.0).choose(who, request()) is None  # type: ignore[arg-type]


def test_prompts_are_distinguished_by_their_tokens() -> None:
    keys = {unit_key("prompt", ANYBODY, request(prompt=ids)) for ids in ((1, 2), (1, 2, 3), (2, 1), (258,), (2, 1))}
    assert len(keys) == 4
    assert unit_key("prompt", ADA, request(1)) == unit_key("prompt", BOB, request(2))


@given(now=st.floats(0, 4e9), block_s=st.floats(1, 3600), washout=st.floats(0, 0.9))
def test_a_block_is_a_period_and_its_arm_is_known_in_advance(now: float, block_s: float, washout: float) -> None:
    blocks = chooser(block_s, washout * block_s, lambda: now)
    choice = blocks.choose(ANYBODY, request())
    assert choice is not None
    assert choice.block == int(now // block_s)
    assert choice.arm == ("a" if bucket("salt", f"block:{choice.block}") < 5000 else "b")
    assert choice.warm_up == (now - choice.block * block_s < washout * block_s)


def test_all_requests_of_a_block_get_its_arm_and_blocks_are_random() -> None:
    time = [0.0]
    blocks = chooser(10.0, 2.0, lambda: time[0])
    arms: dict[int, set[str]] = {}
    washed = Counter()  # type: ignore[var-annotated]
    for tick in range(20_000):
        time[0] = 1e9 + tick / 4
        choice = blocks.choose(ANYBODY, request(tick))
        assert choice is not None
        arms.setdefault(choice.block, set()).add(choice.arm)
        washed[choice.warm_up] += 1
    assert all(len(found) == 1 for found in arms.values())
    order = [next(iter(arms[block])) for block in sorted(arms)]
    assert 200 < order.count("a") < 300
    assert 200 < sum(x != y for x, y in pairwise(order)) < 300  # no rhythm
    assert washed[True] / 20_000 == pytest.approx(0.2, abs=0.001)


def test_a_block_whose_engine_is_not_ready_is_washed_out() -> None:
    time = [100.0]
    blocks = chooser(10.0, 2.0, lambda: time[0], waits_for_engine=True)

    def washes(now: float) -> bool:
        time[0] = now
        choice = blocks.choose(ANYBODY, request())
        assert choice is not None
        assert choice.block == int(now // 10) != NO_BLOCK
        return choice.warm_up

    holds = True
    assert washes(105.0)
    blocks.settled(10, lambda: holds)
    assert washes(106.9)
    assert not washes(107.1)
    holds = False  # the engine has lost the block's settings
    assert washes(108.0)
    holds = True
    assert washes(110.0)  # the next block waits for its own
    assert washes(119.0)
    time[0] = 120.0
    blocks.settled(12, lambda: holds)
    assert washes(121.0)
    assert not washes(122.5)


class LoadingClient:
    """Of an engine that refuses swaps of the draft model as long as ``loads``."""

    def __init__(self) -> None:
        self.draft_setting: tuple[str | None, Any] = ("old", None)
        self.info = SimpleNamespace(head=None)
        self.config = SimpleNamespace(draft_head=None)
        self.engine = SimpleNamespace(state=SimpleNamespace(is_final=False), config=self.config)
        self.loads = True
        self.refused, self.swapped = asyncio.Event(), asyncio.Event()

    async def swap_draft(self, draft: str | None, dtype: Any = None) -> None:
        if self.loads:
            self.refused.set()
            raise SwapUnderWayError
        self.draft_setting = (draft, dtype)
        self.swapped.set()


def warms_up(blocks: BlockChooser) -> bool:
    choice = blocks.choose(ANYBODY, request())
    assert choice is not None
    return choice.warm_up


async def test_a_switch_waits_until_an_operators_draft_is_loaded() -> None:
    client, failures = LoadingClient(), list[str]()
    arm = EngineSettings(frozenset({"draft"}), "small")
    blocks = chooser(3600.0, 0.0, lambda: 0.0, waits_for_engine=True)
    switch = EngineSwitch(cast(EngineClient, client), {"a": arm, "b": arm}, blocks, failures.append)
    switch.start()
    async with asyncio.timeout(60):
        await client.refused.wait()
        client.loads = False
        await client.swapped.wait()
        assert not warms_up(blocks)
        client.config.draft_head = "heads/new"  # an operator adds it
        assert warms_up(blocks)
        client.config.draft_head = None
        client.draft_setting = ("other", None)
        assert warms_up(blocks)
        client.loads = True
        client.refused.clear()
        stopping = asyncio.create_task(switch.stop())
        await client.refused.wait()
        client.loads = False
        await stopping
    assert (client.draft_setting, failures) == (("old", None), [])


def test_requests_are_matched_by_their_fields() -> None:
    given = dataclasses.replace(request(), session="", prompt_ids=(1,))
    assert unit_key("request", ADA, given) == "team/r0"
