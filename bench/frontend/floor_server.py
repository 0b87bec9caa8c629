"""The libraries under our faces in a process of their own, to tell their time from ours."""

from __future__ import annotations

from bench.child_server import ChildServer


class FloorServer(ChildServer):
    """A `bench.frontend.floor_process`, with ``step_ms`` milliseconds between messages."""

    def __init__(self, step_ms: float) -> None:
        super().__init__("bench.frontend.floor_process", str(step_ms))
