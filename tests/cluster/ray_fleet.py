"""`specdec cluster serve` as a process: a real Ray, a real Envoy, replicas with the scripted engine."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import yaml

from cluster.replica_process import free_ports
from tests.cluster.scripted_server import program
from tools.markdown import REPOSITORY

MODEL = "coder"
_START_S, _STOP_S = 120.0, 60.0


class RayFleet:
    """A fleet of one model that runs within a ``with`` block. ``file``: its cluster.yaml, written by `rewrite`."""

    def __init__(self, folder: Path, *, replicas: int = 2) -> None:
        self._folder, self._python = folder, program(folder)
        self.file = folder / "cluster.yaml"
        self.http_port, self.grpc_port = free_ports("127.0.0.1", 2)
        self.config: dict[str, Any] = {
            "models": [
                {
                    "name": MODEL, "http_port": self.http_port, "grpc_port": self.grpc_port,
                    "settings": {"engine": {"target": "scripted:5:5:65536"}, "server": {"log_calls": False}},
                    "replicas": {"min": replicas, "max": replicas, "cpus": 0.1},
                    "releases": {"blue": self.release()},
                }
            ],
            "listen": {"admin_port": 0},
            "drain_s": 10,
            "folder": str(folder / "state"),
        }  # fmt: skip
        self.rewrite()
        self._log = folder / "serve.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def model(self) -> dict[str, Any]:
        """The model's part of `config`."""
        found: dict[str, Any] = self.config["models"][0]
        return found

    @property
    def state_file(self) -> Path:
        """The state that a restarted reconciler loads."""
        return self._folder / "state" / "fleet.json"

    @property
    def url(self) -> str:
        """URL for clients."""
        return f"http://127.0.0.1:{self.http_port}"

    def release(self, weight: int = 100, **settings: Any) -> dict[str, Any]:
        """A release with scripted servers."""
        return {"weight": weight, "python": str(self._python), "settings": settings}

    def rewrite(self) -> None:
        """Writes `config` to the file."""
        self.file.write_text(yaml.safe_dump(self.config))

    def __enter__(self) -> RayFleet:
        words = self._words("serve")
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(words, stdout=log, stderr=log, env=_environment(), cwd=self._folder)
        self.until(lambda: "ready: " in self.said(), _START_S)
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None  # it was entered
        self._process.send_signal(signal.SIGTERM)
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            raise

    def said(self) -> str:
        """The output of `serve`."""
        return self._log.read_text()

    def command(self, *words: str, fails: bool = False) -> str:
        """Runs `specdec cluster WORDS` on this fleet; returns its output."""
        done = subprocess.run(
            self._words(*words), capture_output=True, text=True, env=_environment(), timeout=120, cwd=self._folder
        )
        assert (done.returncode != 0) == fails, done.stdout + done.stderr
        return done.stdout + done.stderr

    def status(self) -> dict[str, Any]:
        """The model's releases, from `status --json`."""
        text = self.command("status", "--json")
        found: dict[str, Any] = json.loads(text[text.index("{") :])["models"][MODEL]
        return found

    def replicas(self, release: str = "blue") -> list[dict[str, Any]]:
        """The replicas of a release."""
        found: list[dict[str, Any]] = self.status()[release]["replicas"]
        return found

    def server_pids(self) -> dict[str, int]:
        """Process ids of the servers, by replica."""
        found = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdigit():
                try:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                path = next((word.decode() for word in words if word.endswith(b"specdec.yaml")), "")
                if path.startswith(str(self._folder)):
                    found[Path(path).parent.name] = int(folder.name)
        return found

    def ray_pids(self, title: str) -> list[int]:
        """Ids of the processes of the fleet's Ray whose command line starts with ``title``."""
        found = []
        for each in self._children():
            with contextlib.suppress(psutil.Error):
                if " ".join(each.cmdline()).startswith(title):
                    found.append(each.pid)
        return found

    def listeners(self) -> list[tuple[str, str]]:
        """The addresses that processes of the fleet listen on, each with the process's name."""
        found = []
        for each in self._children():
            with contextlib.suppress(psutil.Error):
                connections = each.net_connections("tcp")
                found += [(one.laddr.ip, each.name()) for one in connections if one.status == psutil.CONN_LISTEN]
        return found

    def until(self, holds: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Waits until the condition holds."""
        late_s = time.monotonic() + limit_s
        while not holds():
            assert self._process is not None
            assert self._process.poll() is None, self.said()
            assert time.monotonic() < late_s, self.said()
            time.sleep(0.1)

    def _children(self) -> list[psutil.Process]:
        assert self._process is not None
        return psutil.Process(self._process.pid).children(recursive=True)

    def _words(self, command: str, *words: str) -> list[str]:
        return [sys.executable, "-m", "specdec.cli.main", "cluster", command, "-f", str(self.file), *words]


def _environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(REPOSITORY)}
