"""A real server, for clients that other people wrote."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

MODEL = "qwen2.5-coder-0.5b"  # it calls tools


@pytest.fixture(scope="session")
def url() -> Iterator[str]:
    """The HTTP address of a server with `MODEL`."""
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--grpc-port", "0", "--http-port", "0"]
    command += ["--target", MODEL, "--kv-tokens", "8192", "--kv-disk-bytes", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            printed = "".join(process.stdout.readline() for _ in range(3))
            yield re.findall(r"HTTP +(http://[^/\s]+)", printed)[0]
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0
