"""Refuses to load a model that does not fit in memory, before the system starts to swap or kill."""

from __future__ import annotations

from pathlib import Path

import psutil

from specdec.config import WeightDtype
from specdec.errors import ModelError

GIB = 1 << 30
WORKING_BYTES = 256 << 20  # slices in conversion, the tokenizer, the interpreter
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(cgroup: Path = _CGROUP) -> int:
    """Bytes this process may still take: what the machine has free, or the container's limit leaves."""
    free = psutil.virtual_memory().available
    limit = cgroup / "memory.max"
    if not limit.exists() or not (text := limit.read_text().strip()).isdigit():
        return free
    used = int((cgroup / "memory.current").read_text())
    stat = dict(line.split() for line in (cgroup / "memory.stat").read_text().splitlines())
    reclaimable = int(stat.get("inactive_file", 0)) + int(stat.get("active_file", 0))
    return min(free, int(text) - used + reclaimable)


def check_memory(name: str, nbytes: int, dtype: WeightDtype, available: int | None = None) -> None:
    """ModelError unless ``nbytes`` of weights and some working space fit in ``available`` (default: measured)."""
    available = available_bytes() if available is None else available
    needed = nbytes + WORKING_BYTES
    if needed > available:
        ways = "use a smaller model" if dtype == "int8" else "use dtype int8 or a smaller model"
        raise ModelError(
            f"{name}: too little memory: {dtype} weights need {needed / GIB:.1f} GiB, "
            f"{max(available, 0) / GIB:.1f} GiB are available; {ways}, or free some memory"
        )
