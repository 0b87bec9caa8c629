"""AdminService: what operators do to a running server."""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable
from typing import Any, cast, get_args

import grpc

from server.auth.check_admin import check_admin
from server.frontend import Frontend
from server.grpc.errors import guarded
from specdec.api.v1 import admin_pb2 as pb
from specdec.api.v1 import admin_pb2_grpc as pb_grpc
from specdec.config import WeightDtype
from specdec.errors import ViolationCollector

Context = grpc.aio.ServicerContext[Any, Any]
_DTYPES = get_args(WeightDtype)
_SERVICE = "AdminService"


class AdminServicer(pb_grpc.AdminServiceServicer):
    """``not_serving`` tells health's watchers for good; ``drain_s`` is how long the server itself waits at its end."""

    def __init__(self, frontend: Frontend, not_serving: Callable[[], Awaitable[None]], drain_s: float) -> None:
        self._frontend, self._not_serving, self._drain_s = frontend, not_serving, drain_s

    @guarded
    async def Drain(self, request: pb.DrainRequest, context: Context) -> pb.DrainResponse:
        """No new request from now on."""
        check_admin(_SERVICE)
        timeout_s = request.timeout_s if request.HasField("timeout_s") else self._drain_s
        seen = ViolationCollector()
        sound = math.isfinite(timeout_s) and timeout_s >= 0
        seen.check(sound, "timeout_s", "must be a number of seconds, not negative")
        seen.raise_if_any()
        await self._not_serving()
        return pb.DrainResponse(running=await self._frontend.gate.drain(timeout_s))

    @guarded
    async def FlushCache(self, request: pb.FlushCacheRequest, context: Context) -> pb.FlushCacheResponse:
        """Forgets cached prefixes."""
        check_admin(_SERVICE)
        return pb.FlushCacheResponse(pages=await self._frontend.client.flush_cache())

    @guarded
    async def SwapDraft(self, request: pb.SwapDraftRequest, context: Context) -> pb.SwapDraftResponse:
        """Changes or drops the draft model."""
        check_admin(_SERVICE)
        seen = ViolationCollector()
        seen.check(request.dtype in ("", *_DTYPES), "dtype", f"one of {', '.join(_DTYPES)}, got {request.dtype[:40]!r}")
        seen.check(bool(request.draft) or not request.dtype, "dtype", "has no meaning without a draft")
        seen.raise_if_any()
        dtype = cast(WeightDtype, request.dtype) if request.dtype else None
        info = await self._frontend.client.swap_draft(request.draft or None, dtype)
        return pb.SwapDraftResponse(draft=info.draft, drafters=info.drafters)
