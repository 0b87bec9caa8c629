"""The control groups around this process, and the cores that they leave it."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

MOUNT, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
_V2 = ("cpu.max",)  # quota and period in one file
_V1 = ("cpu.cfs_quota_us", "cpu.cfs_period_us")


def usable_cores(mount: Path = MOUNT, own: Path = OWN_GROUPS) -> int:
    """The cores that this process may use: those of its affinity, or fewer where a control group limits its CPU time,
    as `docker --cpus`, Kubernetes' limits and systemd's CPUQuota do. A part of a core counts as one.

    mount: of the control groups. own: the file that lists this process's groups.
    """
    places = own_groups(own)
    roots = [(mount, places.get("", "/"), _V2), (mount / "cpu", places.get("cpu", "/"), _V1)]
    found = [_quota(group, files) for root, place, files in roots for group in upwards(root, place)]
    return min([len(os.sched_getaffinity(0)), *(cores for cores in found if cores is not None)])


def own_groups(own: Path) -> dict[str, str]:
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


def upwards(root: Path, place: str) -> Iterator[Path]:
    """The group and its parents. In a container the path may be the host's, of which only the root exists."""
    group = root / place.strip("/")
    while group != root:
        yield group
        group = group.parent
    yield root


def _quota(group: Path, files: tuple[str, ...]) -> int | None:
    """Whole cores; None: no limit."""
    try:
        quota, period = (int(word) for file in files for word in (group / file).read_text().split())
    except (OSError, ValueError):  # no such group, or `max`
        return None
    return max(1, math.ceil(quota / period)) if quota > 0 and period > 0 else None
