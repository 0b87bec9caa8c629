"""Whether this machine can run the GPU's checks: all packages there, and a GPU that torch sees."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence

# What suites and benches import, directly or through these
NEEDED = ("specdec.engine.engine", "specdec.models", "bench.kernels.kernel_bench", "pytest", "hypothesis")
NO_GPU = 3
HOW_TO_BRING = """\
Where packages can be downloaded, `make gpu-wheels` puts the missing ones into the folder .whl. Take it to this machine:
    python3 -m pip install -q --no-index --no-deps --target /tmp/site .whl/*.whl
    PYTHONPATH=/tmp/site make gpu OUT=folder"""


def refusal(needed: Sequence[str] = NEEDED) -> str | None:
    """Why nothing can be run here, and what to do about it; None: all is well. Asked in a process of its own, which
    holds no memory of the GPU's afterwards."""
    code = f"import {', '.join(needed)}; import torch; raise SystemExit({NO_GPU} * (not torch.cuda.is_available()))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    if run.returncode == 0:
        return None
    if run.returncode == NO_GPU:
        return "torch finds no GPU; there is nothing to check"
    lines = run.stderr.strip().splitlines() or [f"exit code {run.returncode}"]
    missing = re.search(r"No module named '([^']+)'", lines[-1])
    if missing is None:
        return f"what is to be checked can not be imported: {lines[-1]}"
    return f"the module {missing[1]} is missing here.\n{HOW_TO_BRING}"
