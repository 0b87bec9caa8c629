"""How an experiment stands."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from server.experiment.live.stored_state import State


@dataclass(frozen=True)
class ExperimentStatus:
    """``started``: ISO 8601, its very first start. ``records`` by arm, the control first. ``left_out``: requests that
    took no part, by why, since the server runs it; ``given_up``: shadows that were not sent to their end. ``reason``:
    why it does not run any more."""

    name: str
    state: State
    mode: str
    started: str
    records: Mapping[str, int]
    reason: str = ""
    left_out: Mapping[str, int] = field(default_factory=dict)
    given_up: int = 0
    warnings: tuple[str, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self) | {"records": dict(self.records), "left_out": dict(self.left_out)}
