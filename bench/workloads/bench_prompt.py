"""One prompt of a workload."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import StoppingParams


@dataclass(frozen=True, slots=True)
class BenchPrompt:
    """What is asked, whichever way it is decoded. ``session`` names the editor that asks ("" for none).

    One that is not ``counted`` warms the engine or its session up; its figures are thrown away.
    """

    name: str
    prompt_ids: tuple[int, ...]
    stopping: StoppingParams = field(default_factory=StoppingParams)
    prediction_ids: tuple[int, ...] = ()
    session: str = ""
    counted: bool = True
