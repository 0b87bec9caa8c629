"""Who wants to hear of one request while it runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.telemetry.request_record import RequestRecord
    from specdec.types import RequestEvent


class RequestWatcher(Protocol):
    """Told in the event loop, between the engine's word and its reader: must be quick, and must not raise."""

    def saw(self, event: RequestEvent) -> None:
        """The engine said something of it."""

    def ended(self, record: RequestRecord) -> None:
        """Nothing more comes; ``record`` is complete. Told once."""
