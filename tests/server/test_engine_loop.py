"""The engine process's loop: what it does while there are no requests."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, cast

from server.engine_process import SWITCH_INTERVAL_S, EngineLoop
from server.ipc import Frame, ParentLink
from specdec.engine.engine import Engine
from specdec.errors import SpecdecError

HEARTBEAT_S = 60.0


class Idle:
    """An engine without requests, with three parts of work that no request should wait for."""

    left = 3

    def has_work(self) -> bool:
        return False

    def idle(self) -> bool:
        self.left = max(0, self.left - 1)
        return self.left > 0


class Waiting:
    """A front end that sends nothing, and ends the engine once it has waited for a command."""

    def __init__(self) -> None:
        self.waits: list[float] = []

    def receive(self, wait_s: float) -> Iterator[list[Any]]:
        self.waits.append(wait_s)
        yield from [[Frame.CLOSE]] if wait_s else []


def test_an_idle_engine_works_between_looks_for_commands() -> None:
    engine, link = Idle(), Waiting()
    EngineLoop(cast(Engine, engine), cast(ParentLink, link), HEARTBEAT_S, None).run()
    assert engine.left == 0
    assert link.waits[:-1] == [0.0, 0.0]
    assert link.waits[-1] > HEARTBEAT_S / 2


def refuse(config: object, progress: object) -> Engine:
    """An engine that refuses to start, and says the interpreter's switch interval."""
    raise SpecdecError(f"threads switch after {sys.getswitchinterval():g} s")


def test_threads_of_the_engine_process_switch_early() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        words = ["--fd", str(theirs.fileno()), "--config", '{"target": "m"}', "--factory", f"{__name__}:refuse"]
        command = [sys.executable, "-m", "server.engine_process", *words]
        assert subprocess.run(command, pass_fds=[theirs.fileno()], check=False).returncode == 2
        assert f"threads switch after {SWITCH_INTERVAL_S:g} s".encode() in ours.recv(4096)
