"""TraceService: the controller's decisions, as the engine keeps them."""

from __future__ import annotations

from typing import Any

import grpc

from server.frontend import Frontend
from server.grpc.errors import guarded
from server.grpc.trace_convert import trace_message
from server.trace_calls import DEFAULT_STEPS, LIMIT_RULE, MAX_STEPS
from specdec.api.v1 import trace_pb2 as pb
from specdec.api.v1 import trace_pb2_grpc as pb_grpc
from specdec.errors import ViolationCollector

Context = grpc.aio.ServicerContext[Any, Any]


class TraceServicer(pb_grpc.TraceServiceServicer):
    """Asks the engine process; a draining server answers too."""

    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    @guarded
    async def GetTrace(self, request: pb.GetTraceRequest, context: Context) -> pb.GetTraceResponse:
        """The engine's last steps."""
        limit = request.limit if request.HasField("limit") else DEFAULT_STEPS
        seen = ViolationCollector()
        seen.check(1 <= limit <= MAX_STEPS, "limit", f"{LIMIT_RULE}, got {limit}")
        seen.raise_if_any()
        steps = await self._frontend.client.trace(limit)
        return pb.GetTraceResponse(steps=[trace_message(step) for step in steps])
