"""All checks that need a GPU, then the benches, within nine minutes: ``python -m tools.gpu_check FOLDER``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 530.0  # in all, after which everything is stopped
LEAST = 10.0  # for any part, however late it is
SLACK = 40.0  # that the measurement in progress may take once the benches begin no further one
UNTIL = {
    "model": 90.0,
    "kernels": 260.0,
}  # seconds from the start when a suite is stopped; what is left is the benches'
SUITES = {
    "model": ["-m", "gpu", "tests/kernels/gpu", "tests/models/device"],
    "kernels": [
        "-m",
        "not slow and not gpu",
        "tests/kernels/gpu",
        "tests/models/device",
        "tests/engine/test_device_engine.py",
    ],
}


def main(arguments: list[str]) -> int:
    """Write tests.json and kernels.json to the folder given. Returns the exit code: 0 when all tests passed in time and
    the benches ran."""
    if len(arguments) != 1:
        print("usage: python -m tools.gpu_check FOLDER", file=sys.stderr)
        return 2
    folder, began = Path(arguments[0]), time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for name, options in SUITES.items():
        report[name] = run_suite(options, began + UNTIL[name] - time.monotonic())
        print(name, report[name], flush=True)
        (folder / "tests.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    bench = run_benches(folder / "kernels.json", began + SECONDS - time.monotonic())
    return 1 if bench or any(suite["code"] for suite in report.values()) else 0


def run_benches(file: Path, seconds: float) -> int:
    """Exit code of the benches, 124 where they were stopped; what they measured until then is in ``file``."""
    measuring = max(LEAST, seconds - SLACK)
    command = [sys.executable, "-m", "bench.kernels", "--json", str(file), "--seconds", str(measuring)]
    try:
        return subprocess.run(command, check=False, timeout=max(seconds, LEAST + SLACK)).returncode
    except subprocess.TimeoutExpired:
        print(f"the benches were stopped after {seconds:.0f} s; {file} holds what they measured", flush=True)
        return 124


def run_suite(options: list[str], seconds: float) -> dict[str, Any]:
    """Exit code of pytest (124: it was stopped for time, and what it had not come to is left out), tests by outcome,
    seconds, and the names of what failed."""
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "--no-header", "-p", "no:cacheprovider", *options]
    began = time.monotonic()
    try:
        run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=max(seconds, LEAST))
        code, text = run.returncode, run.stdout
    except subprocess.TimeoutExpired as late:
        code, text = 124, (late.stdout or b"").decode(errors="replace")
    counts = {name: int(count) for count, name in re.findall(r"(\d+) (passed|skipped|errors?|xfailed)", text)}
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
    return {"code": code, **counts, "failed": failed, "seconds": round(time.monotonic() - began, 1)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
