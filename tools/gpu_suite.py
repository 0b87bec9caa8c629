"""Runs the tests that judge a GPU, with a log that tells what happened even where they were stopped."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

WORKERS = 12  # each is busy compiling most of the time
GRACE = 15.0  # seconds in which a suite that was told to stop prints what failed until then
STOPPED = 124
ALWAYS = ["-v", "-rfE", "--tb=short", "--no-header", "-p", "no:cacheprovider"]
SELECTED = [
    "-m", "gpu or not slow", "tests/kernels/gpu", "tests/models/device", "tests/engine/test_device_engine.py",
]  # fmt: skip
# These compile for other chips than the one that is here: `make aot` does that where there is time.
COMPILE_ONLY = [
    "--ignore=tests/kernels/gpu/test_aot.py",
    "--deselect=tests/kernels/gpu/test_linear_tiles.py::test_one_kind_of_instruction_from_one_row_to_many",
]
OUTCOMES = {
    "PASSED": "passed", "FAILED": "failed", "ERROR": "errors", "SKIPPED": "skipped", "XFAIL": "xfailed",
    "XPASS": "xpassed",
}  # fmt: skip
_OUTCOME = "|".join(OUTCOMES)
# A shell starts what runs beside it with SIGINT ignored, and who ignores it hands that on.
_PYTEST = """
import signal, sys, pytest
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.exit(pytest.main(sys.argv[1:]))
"""
# As pytest -v writes them; the name is also printed alone when a test begins, by xdist on a line of its own.
_PARALLEL = re.compile(rf"^\[gw\d+\] \[ *\d+%\] ({_OUTCOME}) (\S+::.*?) *$")
_SERIAL = re.compile(rf"^(\S+::.*?) ({_OUTCOME})\b.*$")
_BEGUN = re.compile(r"^(\S+\.py::.*?) *$")


def suite_options() -> list[str]:
    """What `make gpu` runs, side by side where pytest-xdist is installed."""
    parallel = ["-n", str(WORKERS), "--dist", "worksteal"] if find_spec("xdist") else []
    return [*parallel, *SELECTED, *COMPILE_ONLY]


def run_suite(options: list[str], seconds: float, log: Path) -> dict[str, Any]:
    """Exit code of pytest (124: it was stopped for time), tests by outcome, seconds, the names of what failed and of
    what had begun and did not end. All that pytest prints is in ``log`` as it comes."""
    began = time.monotonic()
    with log.open("w", encoding="utf-8") as out:
        # A group of its own, so that workers can be ended with it, in this session, so that who ends us ends it.
        process = subprocess.Popen(
            [sys.executable, "-c", _PYTEST, *ALWAYS, *options],
            stdout=out, stderr=subprocess.STDOUT, process_group=0, env={**os.environ, "PYTHONUNBUFFERED": "1"},
        )  # fmt: skip
        code = _wait(process, seconds)
    found = outcomes(log.read_text(encoding="utf-8", errors="replace"))
    return {"code": code, **found, "seconds": round(time.monotonic() - began, 1), "log": log.name}


def outcomes(text: str) -> dict[str, Any]:
    """How many tests passed, failed and so on by what ``text``, perhaps cut off, says of each."""
    ended: dict[str, str] = {}
    begun: dict[str, None] = {}
    for line in text.splitlines():
        if match := _PARALLEL.match(line):
            ended[match[2]] = _worse(ended.get(match[2]), match[1])
        elif line.startswith(("FAILED ", "ERROR ")):  # the summary at the end; also of files that do not import
            outcome, _, rest = line.partition(" ")
            name = rest.partition(" - ")[0]
            ended[name] = _worse(ended.get(name), outcome)
        elif match := _SERIAL.match(line):
            ended[match[1]] = _worse(ended.get(match[1]), match[2])
        elif match := _BEGUN.match(line):
            begun[match[1]] = None
    counts = Counter(OUTCOMES[outcome] for outcome in ended.values())
    failed = sorted(name for name, outcome in ended.items() if outcome in ("FAILED", "ERROR"))
    return {**counts, "failed_tests": failed, "unfinished": [name for name in begun if name not in ended]}


def _worse(known: str | None, outcome: str) -> str:
    """A test that passed and whose clean-up failed is told of twice."""
    return known if known in ("FAILED", "ERROR") else outcome


def _wait(process: subprocess.Popen[bytes], seconds: float) -> int:
    try:
        return process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.send_signal(signal.SIGINT)  # then it tells of the failures so far
        with suppress(subprocess.TimeoutExpired):
            process.wait(GRACE)
        return STOPPED
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # what hangs on the GPU listens to nothing else
        process.wait()
