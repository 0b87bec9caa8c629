"""What the control groups of this process leave it of memory: a container's limit, or a systemd unit's MemoryMax."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

# Limit, use, and the names under which the page cache, which the kernel takes back when it must, is told
_V2 = ("memory.max", "memory.current", ("inactive_file", "active_file"))
_V1 = ("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file"))


def cgroup_free(mount: Path, own: Path) -> int | None:
    """The least that any group around this process leaves, in bytes; None where none of them has a limit.

    mount: where the groups are. own: ``/proc/self/cgroup``.
    """
    places = _own_groups(own)
    roots = [(mount, places.get("", "/"), _V2), (mount / "memory", places.get("memory", "/"), _V1)]
    found = [_free(group, files) for root, place, files in roots for group in _upwards(root, place)]
    return min((left for left in found if left is not None), default=None)


def _own_groups(own: Path) -> dict[str, str]:
    """The process's group by controller; version 2's has none."""
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
    """The group and all around it. In a container the path may be that of the host, of which only the root is here."""
    group = root / place.strip("/")
    while group != root:
        yield group
        group = group.parent
    yield root


def _free(group: Path, files: tuple[str, str, tuple[str, str]]) -> int | None:
    limit_file, used_file, reclaimable = files
    try:
        limit = (group / limit_file).read_text().strip()
        if not limit.isdigit():
            return None
        used = int((group / used_file).read_text())
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        return None
    return int(limit) - used + sum(int(stat.get(name, 0)) for name in reclaimable)
