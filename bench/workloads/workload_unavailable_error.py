"""Why a workload can not be run here."""

from __future__ import annotations

from specdec.errors import SpecdecError


class WorkloadUnavailableError(SpecdecError):
    """The model or this installation lacks what a workload needs; the message tells what, and how to get it."""
