"""All checks that need a GPU, then the benches, within nine minutes: ``python -m tools.gpu_check FOLDER``."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

SECONDS = 520.0  # in all
BENCH_SECONDS = 230.0  # of these, after which the benches begin no further measurement
LEAST = 30.0  # for any part, however late it is
SLACK = 40.0  # that the measurement in progress may take
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
    folder, ends = Path(arguments[0]), time.monotonic() + SECONDS
    folder.mkdir(parents=True, exist_ok=True)
    report: dict[str, Any] = {}
    for name, options in SUITES.items():
        report[name] = run_suite(options, ends - time.monotonic() - BENCH_SECONDS - SLACK)
        print(name, report[name], flush=True)
        (folder / "tests.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    seconds = max(LEAST, ends - time.monotonic() - SLACK)
    command = [sys.executable, "-m", "bench.kernels", "--json", str(folder / "kernels.json"), "--seconds", str(seconds)]
    bench = subprocess.run(command, check=False)
    return 1 if bench.returncode or any(suite["code"] for suite in report.values()) else 0


def run_suite(options: list[str], seconds: float) -> dict[str, Any]:
    """Exit code of pytest (124: it was stopped for time), tests by outcome, seconds, and the names of what failed."""
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
