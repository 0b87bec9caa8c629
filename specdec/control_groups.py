"""The cores and the memory that this process may use: the machine's, or what limits and control groups leave."""

from __future__ import annotations

import math
import os
import resource
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

_MOUNT, _OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_Files = tuple[str, ...]
# Files of a group's quota and period of CPU time, by version of control groups
_CPU_V2 = ("cpu.max",)
_CPU_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
# Files of its memory limit and use; then fields of memory.stat: page cache, which Linux reclaims when it must
_MEMORY_V2 = ("memory.max", "memory.current", "inactive_file", "active_file")
_MEMORY_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file", "total_active_file")


def usable_cores(mount: Path = _MOUNT, own: Path = _OWN_GROUPS) -> int:
    """The cores that this process may use: those of its affinity, or fewer where a control group limits its CPU time,
    as `docker --cpus`, Kubernetes' limits and systemd's CPUQuota do. A part of a core counts as one.

    mount: of the control groups. own: the file that lists this process's groups.
    """
    return min([len(os.sched_getaffinity(0)), *_limits("cpu", _CPU_V2, _CPU_V1, _quota, mount, own)])


def available_bytes(mount: Path = _MOUNT, own: Path = _OWN_GROUPS) -> int:
    """Bytes that this process may still take: the machine's free memory, or what a limit of its control groups or of
    its address space (`ulimit -v`) leaves.

    mount, own: as of `usable_cores`.
    """
    free = [psutil.virtual_memory().available, *_limits("memory", _MEMORY_V2, _MEMORY_V1, _free, mount, own)]
    most, _ = resource.getrlimit(resource.RLIMIT_AS)
    if most != resource.RLIM_INFINITY:
        free.append(most - psutil.Process().memory_info().vms)
    return min(free)


def _limits(
    controller: str, v2: _Files, v1: _Files, read: Callable[[Path, _Files], int | None], mount: Path, own: Path
) -> list[int]:
    """What ``read`` finds in the files of each group around this process that has a limit."""
    places = _own_groups(own)
    roots = [(mount, places.get("", "/"), v2), (mount / controller, places.get(controller, "/"), v1)]
    found = [read(group, files) for root, place, files in roots for group in _upwards(root, place)]
    return [limit for limit in found if limit is not None]


def _own_groups(own: Path) -> dict[str, str]:
    """The process's group by controller; "" is version 2's."""
    try:
        lines = own.read_text().splitlines()
    except OSError:
        return {}
    found: dict[str, str] = {}
    for line in lines:
        _, controllers, place = line.split(":", 2)
        found |= dict.fromkeys(controllers.split(","), place)
    return found


def _upwards(root: Path, place: str) -> Iterator[Path]:
    """The group and its parents. In a container the path may be the host's, of which only the root exists."""
    group = root / place.strip("/")
    while group != root:
        yield group
        group = group.parent
    yield root


def _quota(group: Path, files: _Files) -> int | None:
    """Whole cores; None: no limit."""
    try:
        quota, period = (int(word) for file in files for word in (group / file).read_text().split())
    except (OSError, ValueError):  # no such group, or `max`
        return None
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None


def _free(group: Path, files: _Files) -> int | None:
    """Bytes below the limit, with those that can be reclaimed; None: no limit."""
    *sizes, inactive, active = files
    try:
        limit, used = (int((group / file).read_text()) for file in sizes)
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):  # no such group, or `max`
        return None
    return limit - used + int(stat.get(inactive, 0)) + int(stat.get(active, 0))
