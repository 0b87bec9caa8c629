"""Which arm a request gets, and what its record says about that."""

from __future__ import annotations

from typing import NamedTuple

from server.experiment.record import NO_BLOCK


class Choice(NamedTuple):
    """``key``: whom the arm sticks to, not to be read back from it; empty where it is the request. ``block``: of a
    switchback. ``warm_up``: too near to the block before. ``shadowed``: another arm gets the request too."""

    arm: str
    key: str = ""
    block: int = NO_BLOCK
    warm_up: bool = False
    shadowed: bool = False
