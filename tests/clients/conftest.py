"""A real server, and programs that use clients of others on it."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.clients.install import PYTHON, is_installed

MODEL = "qwen2.5-coder-0.5b"
Drive = Callable[[str], Any]


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The address of a server whose model calls tools."""
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--grpc-port", "0", "--http-port", "0"]
    command += ["--target", MODEL, "--kv-tokens", "8192", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            said = "".join(process.stdout.readline() for _ in range(3))
            yield re.findall(r"HTTP +(http://[^/\s]+)", said)[0]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


@pytest.fixture(scope="session")
def drive(url: str) -> Drive:
    """Runs a program of this folder; what its client saw."""

    def run(program: str) -> Any:
        command = [PYTHON, Path(__file__).with_name(program), url, MODEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    if not is_installed():
        pytest.skip("the clients are not installed: `make clients`")
    return run
