"""What wants to know of calls and requests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from server.telemetry.call_record import CallRecord
    from server.telemetry.request_record import RequestRecord


class TelemetryListener(Protocol):
    """Told once of each. What it does is done in the event loop, so it must be quick and never wait; but for `close`,
    which is called from a thread."""

    def call_began(self, call: CallRecord) -> None:
        """A call comes in."""

    def request_ended(self, record: RequestRecord) -> None:
        """The engine is done with a request, or its reader has left."""

    def call_ended(self, call: CallRecord) -> None:
        """A call was answered, refused, or its client has left."""

    def close(self) -> None:
        """The server ends: hand over what is held back."""
