"""What an overload run does."""

from __future__ import annotations

from dataclasses import dataclass

from bench.serve.objective import Objective


@dataclass(frozen=True, slots=True)
class OverloadPlan:
    """Peak: closed loops of each of ``levels`` at once, ``peak_s`` seconds each after ``settle_s`` that do not count.
    Then Poisson arrivals at ``factor`` times the answers per second found, for ``minutes``. The prompts go on from one
    part to the next, so none comes twice; every answer has ``max_tokens`` tokens: how much work a request is must not
    depend on which ones come.

    ``objectives`` empty: `ROOM` times what whole answers took at the p99 of the least level that is at the peak, give
    or take `KNEE`. ``deadline_s`` goes with every request of the overload, so that the server may refuse what can not
    be done by then; None: the objective of whole answers.
    """

    workload: str = "humaneval"
    levels: tuple[int, ...] = (4, 8, 16, 32)
    peak_s: float = 30.0
    settle_s: float = 8.0
    factor: float = 4.0
    minutes: float = 3.0
    max_tokens: int = 32
    deadline_s: float | None = None
    objectives: tuple[Objective, ...] = ()
    seed: int = 0
