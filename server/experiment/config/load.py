"""What an experiment asks, where the client runs it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from server.experiment.config.strict_model import Seconds, StrictModel


class Load(StrictModel):
    """For `specdec ab run`; an experiment on live traffic takes what comes.

    The prompts are a ``workload``'s, or those of a ``trace`` (a file beside the plan), which has its own arrival
    times. Else requests arrive at a ``rate``, or ``concurrency`` of them run at any time.

    ``cache``: *cold*, no request shares cached prefixes or draft texts with another; *warm*, those of an arm do with
    each other, and never with the other arm's.
    """

    workload: str | None = None
    trace: Path | None = None
    speed: float = Field(1.0, gt=0, description="of a trace: 2 replays it in half the time")
    rate: float | None = Field(None, gt=0, description="requests per second; null: a closed loop")
    arrivals: Literal["constant", "poisson", "gamma"] = "poisson"
    shape: float = Field(0.5, gt=0, description="of gamma arrivals: less than 1 comes in bursts")
    concurrency: int = Field(1, ge=1, description="of a closed loop")
    per_turn: int | None = Field(None, ge=1, description="requests that an arm is asked before the other's turn")
    max_tokens: int | None = Field(None, ge=1, description="longest answer; null: the workload's own limit")
    fixed_length: bool = Field(False, description="every answer as long as it may be")
    temperature: float = Field(0.0, ge=0)
    seed: int = Field(0, ge=0, description="of arrivals and of the requests' own seeds")
    cache: Literal["cold", "warm"] = "cold"
    timeout_s: Seconds = Field(120.0, gt=0)

    @model_validator(mode="after")
    def _one_source(self) -> Load:
        if self.workload is not None and self.trace is not None:
            raise ValueError("workload and trace both say what is asked; give one of them")
        if self.rate is not None and self.trace is not None:
            raise ValueError("rate and trace both say when requests arrive; leave rate out")
        if self.concurrency > 1 and (self.rate is not None or self.trace is not None):
            raise ValueError("concurrency is for a closed loop: leave it out where arrival times are given")
        return self

    @property
    def open_loop(self) -> bool:
        """Whether requests have arrival times."""
        return self.rate is not None or self.trace is not None
