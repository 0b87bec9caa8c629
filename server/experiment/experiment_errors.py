"""What stops an experiment or its analysis."""

from __future__ import annotations

from specdec.errors import SpecdecError


class ExperimentError(SpecdecError):
    """An experiment's folder, plan or records can not be used; the message names which and the way out."""
