"""What goes wrong with one peer, and only with that."""

from __future__ import annotations

from specdec.errors import SpecdecError


class PeerError(SpecdecError):
    """A peer did not start, did not answer, or answered nonsense; the others are measured all the same."""
