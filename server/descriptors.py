"""File descriptors: as many as the system allows, and a reserve for the start of an engine process."""

from __future__ import annotations

import logging
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager, suppress

_LOG = logging.getLogger(__name__)
MAX_DESCRIPTORS = 1 << 16  # soft limit to set, if the hard limit allows it
RESERVED = 16  # more than the start of a process takes: a socket pair and pipes


def raise_descriptor_limit() -> int:
    """Raise this process's soft limit to the hard one, at most `MAX_DESCRIPTORS`; returns the soft limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, MAX_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError) as error:
        _LOG.warning("the limit on open files stays at %d: %s", soft, error)
        return soft
    return wanted


class DescriptorReserve:
    """Holds descriptors open, so that connections cannot take those that a restart of the engine needs."""

    def __init__(self) -> None:
        self._held: list[int] = []
        self._releases = 0
        self._refill()

    @contextmanager
    def released(self) -> Iterator[None]:
        """Free the reserve for the length of the block."""
        self._releases += 1
        self.close()
        try:
            yield
        finally:
            self._releases -= 1
            if not self._releases:
                self._refill()

    def close(self) -> None:
        """Free the reserve."""
        while self._held:
            os.close(self._held.pop())

    def _refill(self) -> None:
        with suppress(OSError):  # connections hold the others; the next release finds fewer
            while len(self._held) < RESERVED:
                self._held.append(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
