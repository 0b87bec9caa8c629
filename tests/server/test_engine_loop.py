"""The engine process: how its threads share the interpreter."""

from __future__ import annotations

import socket
import subprocess
import sys

from server.engine_process import SWITCH_INTERVAL_S
from specdec.engine.engine import Engine
from specdec.errors import SpecdecError


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
