"""Refuses to load a model that does not fit in memory, before the system starts to swap or kill."""

from __future__ import annotations

from pathlib import Path

import psutil

from specdec.config import WeightDtype
from specdec.errors import ModelError
from specdec.models.memory_cgroup import cgroup_free

GIB = 1 << 30
WORKING_BYTES = 256 << 20  # slices in conversion, the tokenizer, the interpreter
_CGROUP, _OWN = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")


def available_bytes(cgroup: Path = _CGROUP, own: Path = _OWN) -> int:
    """Bytes this process may still take: what the machine has free, or what the limit of its container, of its unit
    or of any group around it leaves. cgroup: where the groups are mounted. own: which of them this process is in."""
    free = psutil.virtual_memory().available
    left = cgroup_free(cgroup, own)
    return free if left is None else min(free, left)


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
