"""The supervisor with a scripted engine process and a clock that the test sets."""

from __future__ import annotations

import asyncio
import errno
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from server import engine_supervisor
from server.engine_client import EngineClient
from server.engine_supervisor import EngineChild, EngineSupervisor, RestartPolicy
from server.ipc import Frame, pack
from specdec.client.connection import CallError, RetryPolicy
from specdec.core.types import EngineLoad
from specdec.errors import EngineDeadError
from tests.fake_engine import INFO
from tests.server.harness import make_config


class ScriptedChild:
    """An engine process whose messages the test sends; its own link."""

    pid = 1

    def __init__(self, take: Callable[[list[Any]], None]) -> None:
        self.link, self.last_frame_s = self, 0.0
        self._take = take
        self._dead = asyncio.Event()
        self._fault: Exception | None = None

    async def closed(self) -> None:
        await self._dead.wait()
        if self._fault is not None:
            raise self._fault

    def sends(self, frame: list[Any]) -> None:
        """The link keeps what `take` raises for `closed`."""
        try:
            self._take(frame)
        except Exception as error:
            self._fault = error
            self.kill()

    def becomes_ready(self) -> None:
        self._take([Frame.READY, pack(INFO)])

    def kill(self) -> None:
        self._dead.set()

    async def close(self, grace_s: float) -> None:
        self.kill()

    async def ended(self) -> str:
        return "killed"


class Scene:
    """``now``: the supervisor's time. ``children``: the processes started. ``lost``: the errors that ended calls."""

    def __init__(self, first_s: float) -> None:
        self.now = 0.0
        self.children: asyncio.Queue[ScriptedChild] = asyncio.Queue()
        self.lost: asyncio.Queue[EngineDeadError] = asyncio.Queue()
        self.supervisor = EngineSupervisor(
            make_config(), policy=RestartPolicy(first_s=first_s, quick_s=0.0, silent_s=1e9)
        )
        self.supervisor.listener = self

    async def spawn(
        self, config: Any, factory: str, heartbeat_s: float, take: Callable[[list[Any]], None], _: Any
    ) -> ScriptedChild:
        child = ScriptedChild(take)
        self.children.put_nowait(child)
        return child

    def on_lost(self, error: EngineDeadError, *, died: bool = False) -> None:
        self.lost.put_nowait(error)

    def on_frame(self, frame: list[Any]) -> None:
        raise AssertionError(frame)

    def hint_at(self, now: float) -> float | None:
        self.now = now
        return self.supervisor.unavailable().retry_after_s


@asynccontextmanager
async def acting(monkeypatch: pytest.MonkeyPatch, first_s: float, *, spawn: Any = None) -> AsyncIterator[Scene]:
    """A started supervisor. first_s: of its policy. spawn: instead of the scene's."""
    scene = Scene(first_s)
    monkeypatch.setattr(engine_supervisor, "time", SimpleNamespace(monotonic=lambda: scene.now))
    monkeypatch.setattr(EngineChild, "spawn", spawn or scene.spawn)
    await scene.supervisor.start()
    try:
        async with asyncio.timeout(60):
            yield scene
    finally:
        await scene.supervisor.close()


async def starts(scene: Scene, seconds: float) -> ScriptedChild:
    """The next process, ready after ``seconds``."""
    child = await scene.children.get()
    scene.now += seconds
    child.becomes_ready()
    return child


async def test_the_error_of_a_death_hints_at_the_next_start(monkeypatch: pytest.MonkeyPatch) -> None:
    async with acting(monkeypatch, first_s=4.0) as scene:
        child = await scene.children.get()
        assert scene.hint_at(2.0) == 1.0  # no start has been measured
        scene.now = 12.0
        child.becomes_ready()
        scene.now = 200.0
        child.kill()
        assert (await scene.lost.get()).retry_after_s == 16.0  # a pause of 4 s, then a start of 12
        assert (scene.hint_at(203.0), scene.hint_at(215.5)) == (13.0, 1.0)
        assert scene.children.empty()


async def test_a_start_is_expected_to_take_as_long_as_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    async with acting(monkeypatch, first_s=0.0) as scene:
        child = await starts(scene, 100.0)
        child.kill()
        error = await scene.lost.get()
        seen = CallError(grpc.StatusCode.UNAVAILABLE, str(error), retry_after_s=error.retry_after_s)
        assert RetryPolicy().pause_s(seen, 1, 0.0) == error.retry_after_s == 30.0  # a longer one would end the tries
        scene.now = 300.0
        child = await starts(scene, 20.0)
        scene.now = 400.0
        child.kill()
        assert (await scene.lost.get()).retry_after_s == 20.0
        scene.now = 405.0  # when the next process starts
        await scene.children.get()
        assert (scene.hint_at(405.0), scene.hint_at(415.0), scene.hint_at(500.0)) == (20.0, 10.0, 1.0)


async def test_a_process_that_cannot_be_started_hints_at_the_next_try(monkeypatch: pytest.MonkeyPatch) -> None:
    tried = asyncio.Event()

    async def refuse(*_: Any) -> ScriptedChild:
        tried.set()
        raise OSError(errno.ENOMEM, "no memory")

    async with acting(monkeypatch, first_s=8.0, spawn=refuse) as scene:
        await tried.wait()
        await asyncio.sleep(0)
        assert scene.hint_at(3.0) == 5.0


@pytest.mark.parametrize(
    ("draft", "dropped", "given_up"), [("new", "", True), (None, "suffix", True), (None, "", False)]
)
async def test_a_refused_start_gives_up_only_a_draft_that_was_swapped_in(
    draft: str | None, dropped: str, given_up: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async with acting(monkeypatch, first_s=0.0) as scene:
        supervisor = scene.supervisor
        configured = supervisor.config
        child = await starts(scene, 1.0)
        drafters = tuple(name for name in reversed(configured.drafters) if name != dropped)
        speculation = configured.speculation.model_copy(update={"drafters": drafters})
        supervisor.adopt(INFO, configured.model_copy(update={"draft": draft, "speculation": speculation}))
        child._take([Frame.DIED, True, "no memory"])
        child.kill()
        await scene.children.get()
        assert supervisor.config.draft is None
    assert ("configured draft" in caplog.text) == given_up


async def test_the_end_after_processes_that_cannot_be_started_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    logged: list[bool] = []

    async def refuse(*_: Any) -> ScriptedChild:
        logged.append("not started any more" in caplog.text)
        raise OSError(errno.ENOENT, "no such program")

    monkeypatch.setattr(EngineChild, "spawn", refuse)
    supervisor = EngineSupervisor(make_config(), policy=RestartPolicy(first_s=0.0, give_up_after=2))
    supervisor.listener = Scene(0.0)
    await supervisor.start()
    async with asyncio.timeout(60):
        await supervisor.wait_failed()
    assert logged == [False, False]
    await supervisor.close()
    assert "no such program; it is not started any more" in caplog.text
    assert "restart the server" in str(supervisor.unavailable())


@pytest.mark.parametrize(
    "frame",
    [
        [Frame.EVENTS, [[9, "request"]]],  # a kind of event that there is not
        [Frame.EVENTS],
        [Frame.EVENTS, [[2]]],
        [Frame.ALIVE, 5],
        ["unknown"],
    ],
)
async def test_an_engine_that_sends_a_malformed_frame_is_restarted(
    monkeypatch: pytest.MonkeyPatch, frame: list[Any]
) -> None:
    async with acting(monkeypatch, first_s=0.0) as scene:
        EngineClient(scene.supervisor)  # listens
        (await starts(scene, 1.0)).sends(frame)
        await starts(scene, 1.0)
        assert scene.supervisor.is_ready


def test_a_slow_engine_may_be_silent_for_longer() -> None:
    """A prompt's step on plain kernels, or of a large model, takes longer than any step that does not hang."""
    supervisor = EngineSupervisor(make_config(), policy=RestartPolicy(silent_s=30.0))
    assert supervisor.patience_s == 30.0
    supervisor.load = EngineLoad(prompt_ms=(10.0, 5_000.0, 70_000.0))
    assert supervisor.patience_s == 140.0
    supervisor.adopt(replace(INFO, kernels="reference"), supervisor.config)
    assert supervisor.patience_s == 600.0
