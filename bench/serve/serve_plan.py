"""What a run of load asks for."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from bench.serve.arrivals import Arrivals
from bench.serve.objective import Objective
from bench.serve.serve_report import MAX_SLIP_MS
from specdec.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServePlan:
    """One of three ways to send: at ``arrivals``, as in the file ``trace`` (``speed`` times as fast), or, with neither,
    ``at_once`` requests at any time until ``requests`` were sent or ``duration_s`` has passed. ``warm_up`` requests
    come before, two at a time, and are not counted. ``fixed``: every answer of a workload is as long as it may be, so
    that one request is as much work as another.

    Raises:
        ConfigError: the plan has no end, or two ways to send.
    """

    workload: str = "humaneval"
    at_once: int = 1
    requests: int | None = None
    duration_s: float | None = None
    arrivals: Arrivals | None = None
    trace: Path | None = None
    speed: float = 1.0
    max_tokens: int | None = None
    fixed: bool = False
    warm_up: int = 4
    seed: int = 0
    timeout_s: float = 120.0
    objectives: tuple[Objective, ...] = ()
    price_per_hour: float = 0.0
    max_slip_ms: float = MAX_SLIP_MS

    def __post_init__(self) -> None:
        if self.arrivals is not None and self.trace is not None:
            raise ConfigError("serve: a rate and a trace both say when to send; give one of them")
        if self.arrivals is None and self.trace is None and self.requests is None and self.duration_s is None:
            raise ConfigError("serve: give a number of requests or a duration")

    @property
    def kind(self) -> str:
        """How requests are sent, in words."""
        if self.trace is not None:
            return f"replay of {self.trace.name} at {self.speed:g} x"
        if self.arrivals is None:
            return f"closed loop, {self.at_once} at once"
        rate, shape = self.arrivals, self.arrivals.shape
        law = "evenly spaced" if shape is None else "Poisson" if shape == 1 else f"gamma of shape {shape:g}"
        to = "" if rate.end_rate is None else f" to {rate.end_rate:g}"
        return f"open loop, {law}, {rate.rate:g}{to} requests/s for {rate.duration_s:g} s"
