"""What is known of one call, of either face."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from server.telemetry.request_record import RequestRecord


ARM = "x-specdec-arm"
"""The header in which callers ask for arms of experiments, and are told which they got."""


@dataclass(slots=True, eq=False)
class CallRecord:
    """A call from its first byte to its end. Times are in seconds: ``began_s`` and ``ended_s`` monotonic, ``at_s`` of
    the wall clock.

    ``face`` is `http` or `grpc`, ``endpoint`` a path or a method. ``many``: a session that makes requests without end,
    which are not kept here. ``status`` is HTTP's number or gRPC's name, ``reason`` the machine-readable cause of a
    refusal or of a broken answer, ``key`` and ``tenant`` whose call it is where that was asked. ``trace_headers`` are
    the W3C trace context that came with it, ``trace_id`` the trace it belongs to, where traces are made.
    ``arm_asked`` are the arms of experiments that the caller asks for, ``arm`` those it got, as in the header for them.
    """

    face: str
    endpoint: str
    request_id: str
    began_s: float
    at_s: float
    many: bool = False
    trace_headers: dict[str, str] = field(default_factory=dict)
    trace_id: str = ""
    ended_s: float = 0.0
    status: str = ""
    reason: str = ""
    key: str = ""
    tenant: str = ""
    arm_asked: str = ""
    arm: str = ""
    requests: list[RequestRecord] = field(default_factory=list)

    @property
    def duration_s(self) -> float:
        """How long it took."""
        return self.ended_s - self.began_s
