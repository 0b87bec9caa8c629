"""Which processors each rank runs on, where a machine has several memories."""

from __future__ import annotations

from pathlib import Path

_NODES = Path("/sys/devices/system/node")


def rank_processors(size: int, allowed: set[int], nodes: Path = _NODES) -> list[set[int]] | None:
    """Processors of each of ``size`` ranks, of those ``allowed``: whole NUMA nodes, or parts of one, so that a rank's
    weights lie in the memory nearest to it. None where there is but one node, or nobody tells."""
    found = [cpus & allowed for cpus in _nodes(nodes)]
    parts = [sorted(cpus) for cpus in found if cpus]
    if len(parts) < 2:
        return None
    if size <= len(parts):
        spans = [parts[len(parts) * rank // size : len(parts) * (rank + 1) // size] for rank in range(size)]
        return [set().union(*span) for span in spans]
    ranks: list[set[int]] = []
    for number, cpus in enumerate(parts):
        first, last = (-(-size * each // len(parts)) for each in (number, number + 1))
        share = last - first
        if len(cpus) < share:
            return None
        ranks += [set(cpus[len(cpus) * i // share : len(cpus) * (i + 1) // share]) for i in range(share)]
    return ranks


def _nodes(folder: Path) -> list[set[int]]:
    files = sorted(folder.glob("node[0-9]*/cpulist"), key=lambda file: int(file.parent.name.removeprefix("node")))
    try:
        return [_cpus(file.read_text()) for file in files]
    except (OSError, ValueError):
        return []


def _cpus(text: str) -> set[int]:
    """Those of a list as the kernel writes it: 0-3,8."""
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        low, _, high = part.partition("-")
        found |= set(range(int(low), int(high or low) + 1))
    return found
