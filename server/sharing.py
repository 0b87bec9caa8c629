"""How the engines of one server share the cores and memory of its machine."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping

import psutil

from server.engine_supervisor import EngineSupervisor
from specdec.config import EngineConfig

_LOG = logging.getLogger(__name__)


def with_shared_cores(engines: Mapping[str, EngineConfig], cores: int | None = None) -> dict[str, EngineConfig]:
    """``engines`` with a number of threads each. Engines without a setting share the remaining cores equally, with at
    least one thread. cores: default: those that this process may use."""
    cores = len(os.sched_getaffinity(0)) if cores is None else cores
    asked = sum(engine.threads for engine in engines.values())
    if asked > cores:
        fields = ", ".join(f"engines.{name}.threads" for name, engine in engines.items() if engine.threads)
        _LOG.warning("%s: %d threads on %d cores slow each other down while all engines work", fields, asked, cores)
    open_ended = [name for name, engine in engines.items() if not engine.threads]
    found = dict(engines)
    left = max(0, cores - asked)
    for place, name in enumerate(open_ended):
        part = left // len(open_ended) + (place < left % len(open_ended))
        found[name] = engines[name].model_copy(update={"threads": max(1, part)})
    return found


def promised_bytes(engines: Iterable[EngineSupervisor]) -> int:
    """Bytes that running engines will need and have not allocated yet: KV caches fill as they are used."""
    return sum(_promised(engine) for engine in engines)


def _promised(engine: EngineSupervisor) -> int:
    if engine.pid is None or not engine.is_known:
        return 0
    try:
        process = psutil.Process(engine.pid)
        # Mapped file pages count as free memory, so they are not subtracted.
        taken = [each.memory_info() for each in (process, *process.children())]  # ranks of engine.tp
    except psutil.Error:
        return 0  # it has ended, and its memory is free
    return max(0, engine.info.memory_bytes - sum(memory.rss - memory.shared for memory in taken))
