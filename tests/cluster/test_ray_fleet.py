"""A fleet on a real Ray behind a real Envoy: replicas die, are replaced, added and removed, and no call is lost."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from cluster.reconciler import SILENT_PERIODS
from specdec.client import Client
from specdec.core.types import Delta, StoppingParams
from tests.cluster.calls import Outcomes, calls, expected, release_of
from tests.cluster.ray_fleet import MODEL, RayFleet

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(420),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="needs `make setup-cluster`"),
]
AT_ONCE = 8


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayFleet]:
    """Two replicas of one release."""
    with RayFleet(tmp_path_factory.mktemp("fleet")) as running:
        yield running


async def load_during(fleet: RayFleet, work: asyncio.Task[None], at_least: int) -> Outcomes:
    """Calls until ``work`` ends, and at least ``at_least``."""
    outcomes = await calls(fleet.url, at_once=AT_ONCE, while_=lambda n: n < at_least or not work.done())
    await work
    return outcomes


def are_others(former: dict[str, int], now: dict[str, int]) -> bool:
    """Whether the number of servers is the same and all were replaced."""
    return len(now) == len(former) and not set(former.values()) & set(now.values())


def test_nothing_listens_off_loopback(fleet: RayFleet) -> None:
    found = fleet.listeners()
    assert len(found) > 4
    assert {address for address, _ in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}, found


async def test_a_killed_replica_fails_no_call_without_a_first_byte_and_is_replaced(fleet: RayFleet) -> None:
    def kill() -> None:
        time.sleep(1)
        os.kill(fleet.server_pids()["coder.blue.0"], signal.SIGKILL)
        killed_s = time.monotonic()
        fleet.until(lambda: "coder.blue.0: gone" in fleet.said(), 10)
        gone_s = time.monotonic() - killed_s
        fleet.until(lambda: fleet.said().count("coder.blue.0: ready") == 2)
        print(f"off the list {gone_s:.1f} s after its death, back after {time.monotonic() - killed_s:.1f} s")

    work = asyncio.create_task(asyncio.to_thread(kill))
    outcomes = await load_during(fleet, work, 500)
    print(f"{outcomes.all} calls, {outcomes.cut.total()} of them cut")
    assert outcomes.all >= 500
    assert not outcomes.lost
    assert not outcomes.wrong
    assert outcomes.cut.total() <= AT_ONCE


async def test_started_streams_resume_on_another_replica_with_the_same_text(fleet: RayFleet) -> None:
    victim = next(replica for replica in fleet.replicas() if replica["state"] == "ready")
    tokens, cut = 400, list[int]()
    gaps: list[float] = []

    async def read(client: Client, number: int) -> str:
        text, last_s = "", time.monotonic()
        async for event in client.stream(f"stream {number}", stopping=StoppingParams(max_tokens=tokens)):
            if isinstance(event, Delta):
                text += event.text
                gaps.append(time.monotonic() - last_s)
            last_s = time.monotonic()
        return text

    async def kill() -> None:
        await asyncio.sleep(1)
        async with httpx.AsyncClient(trust_env=False) as client:
            (load,) = (await client.get(f"http://127.0.0.1:{victim['http_port']}/v1/loads")).json()["loads"]
        cut.append(load["num_running_reqs"])
        os.kill(fleet.server_pids()[victim["id"]], signal.SIGKILL)

    restarts = fleet.said().count(f"{victim['id']}: ready")
    async with Client(f"127.0.0.1:{fleet.grpc_port}") as client:
        *texts, _ = await asyncio.gather(*(read(client, number) for number in range(16)), kill())
    assert texts == [expected(f"stream {number}", tokens) for number in range(16)]
    assert cut[0] > 0
    print(f"{cut[0]} of 16 streams were cut; the longest pause of any was {max(gaps):.2f} s")
    await asyncio.to_thread(fleet.until, lambda: fleet.said().count(f"{victim['id']}: ready") > restarts)


async def test_no_call_fails_while_every_replica_is_replaced(fleet: RayFleet) -> None:
    former = fleet.server_pids()

    def replace() -> None:
        fleet.command("rollout", MODEL, "--restart")
        fleet.until(lambda: are_others(former, fleet.server_pids()))

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(replace)), 2000)
    print(f"{outcomes.all} calls, {outcomes.complete} complete")
    assert (outcomes.failed, outcomes.lost, outcomes.cut) == (0, {}, {})
    assert outcomes.complete >= 2000


async def test_no_call_fails_while_replicas_are_added_removed_and_drained(fleet: RayFleet) -> None:
    def change() -> None:
        fleet.command("scale", MODEL, "3")
        fleet.until(lambda: len(fleet.server_pids()) == 3 and {r["state"] for r in fleet.replicas()} == {"ready"})
        fleet.command("scale", MODEL, "2")
        fleet.until(lambda: len(fleet.server_pids()) == 2)
        drained = fleet.replicas()[0]["id"]
        pid = fleet.server_pids()[drained]
        fleet.command("drain", drained)
        fleet.until(lambda: pid not in fleet.server_pids().values())
        fleet.until(lambda: [replica["state"] for replica in fleet.replicas()] == ["ready", "ready"])

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(change)), 200)
    assert (outcomes.failed, outcomes.lost, outcomes.cut) == (0, {}, {})
    assert "no replica 'coder.blue.9'" in fleet.command("drain", "coder.blue.9", fails=True)


async def test_a_drained_replica_finishes_streams_though_serve_replaces_it_immediately(fleet: RayFleet) -> None:
    drained = next(replica["id"] for replica in fleet.replicas() if replica["state"] == "ready")
    pid = fleet.server_pids()[drained]
    # 8 s: longer than Serve keeps an unhealthy replica, and a drained one counts as unhealthy.
    long = asyncio.create_task(calls(fleet.url, at_once=8, while_=lambda n: n < 8, tokens=1600))
    await asyncio.to_thread(fleet.command, "drain", drained)
    outcomes = await long
    assert (outcomes.complete, outcomes.lost, outcomes.cut) == (8, {}, {})
    await asyncio.to_thread(fleet.until, lambda: pid not in fleet.server_pids().values())
    await asyncio.to_thread(fleet.until, lambda: [r["state"] for r in fleet.replicas()] == ["ready"] * 2)


def test_replicas_with_another_fingerprint_do_not_replace_serving_ones(fleet: RayFleet) -> None:
    former = fleet.server_pids()
    fleet.model["releases"]["blue"] = fleet.release(engine={"dtype": "fp32"})
    fleet.rewrite()
    try:
        output = fleet.command("rollout", fails=True)
        assert "numbers-fp32" in output
        assert "a release of its own" in output
        assert set(former.values()) <= set(fleet.server_pids().values())
        assert asyncio.run(calls(fleet.url, at_once=2, while_=lambda n: n < 20)).complete == 20
    finally:
        fleet.model["releases"]["blue"] = fleet.release()
        fleet.rewrite()
    fleet.command("rollout")
    assert {replica["state"] for replica in fleet.replicas()} == {"ready"}


async def test_a_canary_gets_its_sessions_by_hash_is_promoted_and_rolled_back(fleet: RayFleet) -> None:
    fleet.model["releases"]["green"] = fleet.release(0, engine={"dtype": "bf16"})
    fleet.rewrite()
    fleet.command("rollout")
    assert [replica["state"] for replica in fleet.replicas("green")] == ["ready"] * 2

    async def arms() -> dict[str, set[str]]:
        outcomes = await calls(fleet.url, at_once=4, while_=lambda n: n < 128)
        assert outcomes.complete == 128
        return outcomes.arms

    assert await arms() == {f"session-{n}": {"blue"} for n in range(64)}
    await asyncio.to_thread(fleet.command, "rollout", MODEL, "green", "--weight", "30")
    shares = [("green", 30), ("blue", 70)]
    assert await arms() == {f"session-{n}": {release_of(f"session-{n}", shares)} for n in range(64)}
    await asyncio.to_thread(fleet.command, "rollout", MODEL, "green", "--promote")
    assert await arms() == {f"session-{n}": {"green"} for n in range(64)}
    work = asyncio.create_task(asyncio.to_thread(fleet.command, "rollout", MODEL, "--rollback"))
    assert not (await load_during(fleet, work, 100)).lost
    assert await arms() == {f"session-{n}": {release_of(f"session-{n}", shares)} for n in range(64)}
    await asyncio.to_thread(fleet.command, "rollout", MODEL, "green", "--weight", "0")
    del fleet.model["releases"]["green"]
    fleet.rewrite()
    await asyncio.to_thread(fleet.command, "rollout")
    assert [*fleet.status()] == ["blue"]


def saved_weights(fleet: RayFleet) -> dict[str, int]:
    """The weights of the releases in the reconciler's file."""
    state = json.loads(fleet.state_file.read_text())
    return {name: release["weight"] for name, release in state["fleet"]["releases"][MODEL].items()}


async def test_a_full_disk_rejects_commands_and_fails_no_call(fleet: RayFleet) -> None:
    fleet.model["releases"]["green"] = fleet.release(0, engine={"dtype": "bf16"})
    fleet.rewrite()
    await asyncio.to_thread(fleet.command, "rollout")
    await asyncio.to_thread(fleet.command, "rollout", MODEL, "green", "--weight", "30")
    (pid,) = fleet.ray_pids("ray::ReconcilerActor")
    limits, replica = resource.prlimit(pid, resource.RLIMIT_FSIZE), fleet.replicas()[0]["id"]

    def change() -> None:
        before = fleet.state_file.read_bytes()
        resource.prlimit(pid, resource.RLIMIT_FSIZE, (1024, limits[1]))
        try:
            for words in (
                ("rollout", MODEL, "green", "--promote"), ("drain", replica), ("rollout", MODEL, "--rollback")
            ):  # fmt: skip
                assert "nothing changed" in fleet.command(*words, fails=True)
            assert fleet.state_file.read_bytes() == before
            assert {name: release["weight"] for name, release in fleet.status().items()} == {"blue": 70, "green": 30}
        finally:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)
        fleet.command("rollout", MODEL, "green", "--promote")
        assert saved_weights(fleet) == {"blue": 0, "green": 100}
        fleet.command("rollout", MODEL, "--rollback")
        fleet.command("rollout", MODEL, "green", "--weight", "0")

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(change)), 200)
    print(f"{outcomes.all} calls, {outcomes.failed} failed")
    assert (outcomes.failed, outcomes.lost) == (0, {})
    assert saved_weights(fleet) == {"blue": 100, "green": 0}
    assert not list(fleet.state_file.parent.glob(".fleet.json.*"))
    del fleet.model["releases"]["green"]
    fleet.rewrite()
    await asyncio.to_thread(fleet.command, "rollout")


async def test_a_reconciler_stopped_for_longer_than_the_silence_limit_drops_no_replica(fleet: RayFleet) -> None:
    (pid,) = fleet.ray_pids("ray::ReconcilerActor")
    former, gone = fleet.server_pids(), fleet.said().count(": gone")

    def stop() -> None:
        os.kill(pid, signal.SIGSTOP)
        time.sleep(2 * SILENT_PERIODS)
        os.kill(pid, signal.SIGCONT)
        ready = {replica["id"]: replica["http_port"] for replica in fleet.replicas()}
        saved = json.loads(fleet.state_file.read_text())["fleet"]["releases"][MODEL]["blue"]["replicas"]
        assert {replica["id"]: replica["http_port"] for replica in saved} == ready

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(stop)), 200)
    print(f"{outcomes.all} calls during a stop of {2 * SILENT_PERIODS} s, {outcomes.failed} failed")
    assert (outcomes.failed, outcomes.lost, outcomes.cut) == (0, {}, {})
    assert fleet.said().count(": gone") == gone
    assert fleet.server_pids() == former


async def test_a_killed_reconciler_is_restarted_and_continues(fleet: RayFleet) -> None:
    former, gone = fleet.server_pids(), fleet.said().count(": gone")
    ready = [(replica["id"], replica["http_port"]) for replica in fleet.replicas()]

    def kill() -> None:
        (pid,) = fleet.ray_pids("ray::ReconcilerActor")
        os.kill(pid, signal.SIGKILL)
        fleet.until(lambda: fleet.ray_pids("ray::ReconcilerActor") not in ([], [pid]))
        assert [(replica["id"], replica["http_port"]) for replica in fleet.replicas()] == ready
        fleet.command("scale", MODEL, str(len(ready)))

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(kill)), 200)
    assert (outcomes.failed, outcomes.lost, outcomes.cut) == (0, {}, {})
    assert fleet.said().count(": gone") == gone
    assert fleet.server_pids() == former


async def test_replicas_are_added_soon_after_calls_start_to_queue(tmp_path: Path, fleet: RayFleet) -> None:
    """A slow release replaces the fast one; its numbers are the same."""
    fleet.model["releases"]["blue"] = fleet.release(engine={"target": "scripted:100:5:65536:slots=2"})
    fleet.model["autoscaling"] = {"period_s": 1, "up_after_s": 1, "down_after_s": 6}
    fleet.rewrite()
    await asyncio.to_thread(fleet.command, "rollout")
    await asyncio.to_thread(fleet.command, "scale", MODEL, "1", "--max", "2")
    await asyncio.to_thread(fleet.until, lambda: len(fleet.server_pids()) == 1)
    began_s, began = time.monotonic(), fleet.said().count(": starting")
    added_s: list[float] = []

    def grows() -> None:
        fleet.until(lambda: fleet.said().count(": starting") > began)
        added_s.append(time.monotonic() - began_s)
        fleet.until(lambda: [replica["state"] for replica in fleet.replicas()] == ["ready"] * 2)

    outcomes = await load_during(fleet, asyncio.create_task(asyncio.to_thread(grows)), 8)
    assert outcomes.complete == outcomes.all
    print(f"a second replica was started {added_s[0]:.1f} s after calls began to wait")
    shrinks = asyncio.create_task(asyncio.to_thread(fleet.until, lambda: len(fleet.server_pids()) == 1))
    one_by_one = await calls(fleet.url, at_once=1, while_=lambda n: not shrinks.done())
    await shrinks
    assert one_by_one.complete == one_by_one.all
