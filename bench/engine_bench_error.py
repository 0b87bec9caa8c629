"""What stops a benchmark."""

from __future__ import annotations

from specdec.errors import SpecdecError


class BenchError(SpecdecError):
    """The engine did not do what is measured: it failed a request, or the arms gave different texts."""
