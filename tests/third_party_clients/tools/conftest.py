"""Runs the programs of this folder, each with one vendor's client."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.third_party_clients.conftest import MODEL
from tests.third_party_clients.environments import TOOLS

Drive = Callable[[str], Any]


@pytest.fixture(scope="session")
def drive(url: str) -> Drive:
    """Runs a program of this folder and returns what its client received."""

    def run(program: str) -> Any:
        command = [TOOLS.python, Path(__file__).with_name(program), url, MODEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    if not TOOLS.is_installed():
        pytest.skip("the clients are not installed: `make clients`")
    return run
