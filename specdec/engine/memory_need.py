"""One thing that needs memory."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryNeed:
    """``what`` in words, ``nbytes`` of it, and the ``options`` of the configuration that decide how much it is.

    ``later``: it is not needed to serve, but what is served may come to take so much.
    """

    what: str
    nbytes: int
    options: tuple[str, ...] = ()
    later: bool = False
