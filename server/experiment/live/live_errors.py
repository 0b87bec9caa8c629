"""Refusals of those who start, stop or look at experiments."""

from __future__ import annotations

from specdec.errors import RequestError


class ExperimentsOffError(RequestError):
    """This server keeps no experiments."""

    reason = "EXPERIMENTS_OFF"

    def __init__(self) -> None:
        super().__init__("experiments need a place for their records; set server.experiments.folder")


class ExperimentNotFoundError(RequestError):
    """There is no experiment of this name."""

    reason = "EXPERIMENT_NOT_FOUND"

    def __init__(self, name: str) -> None:
        super().__init__(f"there is no experiment {name[:64]!r} here; list them to see which there are")


class ExperimentNotStartedError(RequestError):
    """Another experiment is in the way, or the state of its folder."""

    reason = "EXPERIMENT_NOT_STARTED"


class NoResultError(RequestError):
    """The records say nothing yet, or can not be read."""

    reason = "EXPERIMENT_NO_RESULT"
