"""Notices servers that are gone, so that a run does not fill up with failures."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from server.experiment.experiment_errors import ExperimentError
from server.experiment.record import Record

_PATIENCE = 3


class Pulse:
    """folder: of the run, for the way out."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._silent = 0

    def check(self, records: Sequence[Record]) -> None:
        """Hear of the next turn or block.

        Raises:
            ExperimentError: nothing was answered in three of them.
        """
        self._silent = 0 if any(record.ok for record in records) else self._silent + 1
        if self._silent >= _PATIENCE:
            raise ExperimentError(
                f"nothing is answered any more ({records[-1].error}); the same command goes on with {self._folder}"
            )
