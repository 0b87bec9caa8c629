"""What an overload run does."""

from __future__ import annotations

from dataclasses import dataclass

from bench.serve.objective import Objective


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """Peak: closed loops of each of ``levels`` at once, ``peak_s`` seconds each. Then Poisson arrivals at ``factor``
    times the best one's answers per second, for ``minutes``. Every answer has ``max_tokens`` tokens: how much work a
    request is must not depend on which ones come.

    ``objectives`` empty: twice what whole answers took at the peak's p99. ``deadline_s`` goes with every request of
    the overload, so that the server may refuse what can not be done by then; None: the objective of whole answers.
    """

    workload: str = "humaneval"
    levels: tuple[int, ...] = (4, 8, 16)
    peak_s: float = 15.0
    factor: float = 4.0
    minutes: float = 3.0
    max_tokens: int = 32
    deadline_s: float | None = None
    objectives: tuple[Objective, ...] = ()
    seed: int = 0
