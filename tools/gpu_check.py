"""All checks that need a GPU, then the benches, within nine minutes: ``python -m tools.gpu_check FOLDER``."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from tools.gpu_ready import refusal
from tools.gpu_suite import run_suite, suite_options

SECONDS = 530.0  # in all, after which everything is stopped
TESTS_UNTIL = 240.0  # seconds from the start when the tests are stopped; what is left is the benches'
LEAST = 10.0  # for any part, however late it is
SLACK = 40.0  # that the measurement in progress may take once the benches begin no further one


def main(arguments: list[str]) -> int:
    """Write tests.log, tests.json and kernels.json to the folder given. Returns the exit code: 0 when all tests passed
    in time and the benches measured everything they came to, 2 when nothing can be run here."""
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="FOLDER", help="where the reports go")
    parser.add_argument("--commit", default="", help="what the reports are of, where git does not know it")
    options = parser.parse_args(arguments)
    folder, began = options.folder, time.monotonic()
    why_not = refusal()
    if why_not:
        print(why_not, file=sys.stderr)
        return 2
    folder.mkdir(parents=True, exist_ok=True)
    tests = run_suite(suite_options(), max(LEAST, began + TESTS_UNTIL - time.monotonic()), folder / "tests.log")
    print("tests", tests, flush=True)
    write(folder / "tests.json", {"commit": options.commit or None, "tests": tests})
    bench = run_benches(folder / "kernels.json", began + SECONDS - time.monotonic(), options.commit)
    return 1 if bench or tests["code"] else 0


def write(file: Path, report: dict[str, Any]) -> None:
    """As JSON that people can read."""
    file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def run_benches(file: Path, seconds: float, commit: str = "") -> int:
    """Exit code of the benches, 124 where they were stopped; what they measured until then is in ``file``."""
    measuring = max(LEAST, seconds - SLACK)
    command = [sys.executable, "-m", "bench.kernels", "--json", str(file), "--seconds", f"{measuring:.0f}"]
    command += ["--commit", commit] if commit else []
    try:
        return subprocess.run(command, check=False, timeout=max(seconds, LEAST + SLACK)).returncode
    except subprocess.TimeoutExpired:
        print(f"the benches were stopped after {seconds:.0f} s; {file} holds what they measured", flush=True)
        return 124


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
