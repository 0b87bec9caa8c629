"""What a soak does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SoakPlan:
    """``clients`` visit the server for ``minutes``, in shifts of ``shift_s`` seconds; after each they leave, and the
    server is looked at. Time in which this process was stopped does not count.

    ``hang_s``: what has not ended by then never will. ``rest_s``: how long the server may take to come to rest once
    everybody has left. The first ``warm_up`` of all looks are not judged for growth: until then memory is taken once.
    ``growth_mib``: how much a process may grow over the judged looks, beside ``growth_share`` of its size.
    """

    minutes: float = 60.0
    clients: int = 12
    shift_s: float = 60.0
    seed: int = 0
    hang_s: float = 300.0
    rest_s: float = 90.0
    warm_up: float = 1 / 3
    growth_mib: float = 8.0
    growth_share: float = 0.02
