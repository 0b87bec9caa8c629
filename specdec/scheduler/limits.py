"""The bounds a scheduler keeps."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """``max_batch`` sequences run together; a step has at most ``max_step_rows`` rows, of which ``prefill_chunk``
    are prompt tokens before a pending one; a sequence uses at most ``max_context`` slots; at most ``max_queued``
    requests wait.

    Raises:
        ValueError: a limit is out of range, or a full batch would not fit one row each into a step.
    """

    max_batch: int
    max_step_rows: int
    prefill_chunk: int
    max_context: int
    max_queued: int

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_step_rows", "prefill_chunk", "max_context"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be positive, got {getattr(self, name)}")
        if self.max_queued < 0:
            raise ValueError(f"max_queued: must not be negative, got {self.max_queued}")
        if self.max_batch > self.max_step_rows:
            raise ValueError(f"max_batch: {self.max_batch} sequences need more than {self.max_step_rows} rows a step")
