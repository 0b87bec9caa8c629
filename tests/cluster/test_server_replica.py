"""The replica of Ray Serve: it stays in the fleet while it drains, however long that takes."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from cluster import supervisor
from cluster.autoscale import ReplicaLoad
from cluster.config import ClusterConfig
from cluster.deployment import deployment_of
from cluster.fleet import ReplicaState, draining
from cluster.replica_process import RefusedKeyError, SilentServerError
from specdec.errors import ModelError
from tests.cluster.scripted_ray import scripted_ray


class ScriptedProcess:
    """A server that ends when the test says."""

    errors: ClassVar[list[Exception]] = []
    silent: ClassVar[list[Exception]] = []

    def __init__(self, *_: Any, **__: Any) -> None:
        self.alive, self.stopping, self.over = True, asyncio.Event(), asyncio.Event()
        self.http_port, self.grpc_port = 81, 80

    async def is_ready(self) -> bool:
        """Immediately."""
        return True

    async def load(self) -> tuple[str, ReplicaLoad]:
        """As one that is idle, or fails as often as the test sets."""
        if ScriptedProcess.silent:
            raise ScriptedProcess.silent.pop()
        return "f", ReplicaLoad(0, 0, 0)

    def bound_log(self) -> None:
        """Fails as often as the test sets."""
        if ScriptedProcess.errors:
            raise ScriptedProcess.errors.pop()

    def exit_reason(self) -> str:
        """Of a killed one."""
        return "it was killed"

    def kill(self) -> None:
        """End immediately."""
        self.alive = False

    async def stop(self) -> None:
        """Start to stop while calls continue; return once they are done."""
        self.stopping.set()
        await self.over.wait()
        self.alive = False


@pytest.fixture
def made(tmp_path: Path) -> Iterator[SimpleNamespace]:
    """A reconciler, and how a replica is made."""
    config = ClusterConfig.model_validate({"models": [{"name": "coder"}], "folder": tmp_path / "state"})
    with scripted_ray() as (ray, _, ray_serve):
        ray.running = True
        ray_serve.ReplicaProcess, ray_serve.SETTLE_S, ray_serve.BEAT_S = ScriptedProcess, 0.0, 0.01
        cls = ray_serve.ServerReplica
        cls.serve_ends = cls.__del__
        del cls.__del__  # Serve calls and awaits it, and Python would only call it
        actor = ray_serve.start_reconciler(config).actor

        async def routable(_: Any) -> None:
            pass

        actor.wait_routable = routable

        async def start(begun: list[Any] | None = None) -> Any:
            replica = cls.__new__(cls)
            if begun is not None:
                begun.append(replica)
            await replica.__init__(deployment_of(config, "coder", "blue"))
            return replica

        yield SimpleNamespace(start=start, reconciler=actor._reconciler)


async def test_a_drained_replica_ends_after_its_calls_though_serve_replaces_it_immediately(
    made: SimpleNamespace,
) -> None:
    replica = await made.start()
    made.reconciler.apply(draining, "coder.blue.0")
    await replica._process.stopping.wait()
    with pytest.raises(Exception, match="it was drained"):
        replica.check_health()  # upon which Serve starts another, and ends this one
    ended = asyncio.create_task(replica.serve_ends())
    successor = await made.start()
    assert successor._replica.id == "coder.blue.1"
    beat = made.reconciler._beats["coder.blue.0"]
    while made.reconciler._beats["coder.blue.0"] is beat:  # it still sends heartbeats
        await asyncio.sleep(0.01)
    assert not ended.done()
    assert [r.state for r in made.reconciler.fleet.replicas] == [ReplicaState.DRAINING, ReplicaState.READY]
    replica._process.over.set()
    await ended
    assert [r.id for r in made.reconciler.fleet.replicas] == ["coder.blue.1"]
    successor._process.over.set()
    await successor.serve_ends()


async def test_the_port_of_serve_itself_is_on_loopback(made: SimpleNamespace) -> None:
    """Serve opens one on all interfaces, for calls to the replica's process, of which a fleet makes none."""
    replica = await made.start()
    assert sys.modules["ray.serve._private.replica"].add_port_to_grpc_server(None, "[::]:0") == "127.0.0.1:0"
    replica._process.over.set()
    await replica.serve_ends()


async def test_heartbeats_continue_after_an_error(made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "FIRST_PAUSE_S", 0.01)
    replica = await made.start()
    ScriptedProcess.errors = [OSError("no space"), ValueError("a defect")]
    while ScriptedProcess.errors:
        await asyncio.sleep(0.01)
    beat = made.reconciler._beats["coder.blue.0"]
    while made.reconciler._beats["coder.blue.0"] is beat:
        await asyncio.sleep(0.01)
    replica._process.over.set()
    await replica.serve_ends()


async def test_a_replica_that_does_not_start_leaves_for_good(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Serve ends it as any other."""
    failed: list[Any] = []

    def refused(self: ScriptedProcess, *_: Any, **__: Any) -> None:
        raise ModelError("no such interpreter")

    monkeypatch.setattr(ScriptedProcess, "__init__", refused)
    with pytest.raises(ModelError, match="no such interpreter"):
        await made.start(failed)
    await failed[0].serve_ends()
    assert made.reconciler.fleet.replicas == ()


async def heartbeat(made: SimpleNamespace) -> None:
    """Waits for the next one of the only replica, which follows a request for its load."""
    beat = made.reconciler._beats["coder.blue.0"]
    while made.reconciler._beats["coder.blue.0"] is beat:
        await asyncio.sleep(0.001)


async def test_a_server_that_hangs_is_killed_and_replaced(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """One that refuses the key or fails answers, and one that answers again is not killed."""
    replica = await made.start()
    silence = [SilentServerError("timeout")] * 19
    answers = [*silence, RefusedKeyError("401"), *silence, ModelError("500"), *silence]
    monkeypatch.setattr(ScriptedProcess, "silent", answers)
    async with asyncio.timeout(10):
        while answers:
            await asyncio.sleep(0.001)
        await heartbeat(made)  # with a load again
        replica.check_health()
        monkeypatch.setattr(ScriptedProcess, "silent", [*silence, *silence])
        while made.reconciler.fleet.replicas:
            await asyncio.sleep(0.01)
    cause = "coder.blue.0: its server did not answer 20 requests in a row and was killed: it was killed"
    with pytest.raises(ModelError, match=cause):
        replica.check_health()  # upon which Serve starts another
    assert cause in [record.message for record in caplog.records if record.levelname == "ERROR"]


@pytest.mark.parametrize(
    ("error", "kept"),
    [(RefusedKeyError("401"), False), (ModelError("500"), True), (SilentServerError("timeout"), True)],
)
async def test_a_load_is_kept_until_the_server_refuses_the_key(
    made: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, error: Exception, kept: bool
) -> None:
    """The last one would decide on the number of replicas for good. Other errors pass, and without a load the fleet
    would shrink."""
    replica = await made.start()
    async with asyncio.timeout(10):
        monkeypatch.setattr(ScriptedProcess, "silent", [error])
        while ScriptedProcess.silent:
            await asyncio.sleep(0.001)
        assert bool(replica.record_autoscaling_stats()) is kept
        await heartbeat(made)
        assert replica.record_autoscaling_stats()
    replica._process.over.set()
    await replica.serve_ends()


async def test_a_replaced_replica_ends_without_affecting_its_successor(made: SimpleNamespace) -> None:
    former = await made.start()
    made.reconciler._drop(former._replica.id)
    successor = await made.start()
    assert successor._replica.id == former._replica.id
    await former._process.stopping.wait()
    former._process.over.set()
    await former.serve_ends()
    assert [r.owner for r in made.reconciler.fleet.replicas] == [successor._replica.owner]
    assert made.reconciler.fleet.replicas[0].state is ReplicaState.READY
    successor._process.over.set()
    await successor.serve_ends()
    assert made.reconciler.fleet.replicas == ()
