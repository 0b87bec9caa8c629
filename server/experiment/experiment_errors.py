"""What stops an experiment or its analysis."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.errors import SpecdecError


class ExperimentError(SpecdecError):
    """An experiment's folder, plan or records can not be used; the message names which and the way out."""


class PlanError(ExperimentError):
    """A plan is refused; ``problems`` are all that is wrong with it, each with its line where it has one."""

    def __init__(self, source: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        super().__init__(f"{source}: " + "; ".join(problems))
