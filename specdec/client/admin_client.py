"""AdminService, for operators."""

from __future__ import annotations

from specdec.api.v1 import admin_pb2 as pb
from specdec.api.v1 import admin_pb2_grpc as pb_grpc
from specdec.client.connection import Connection


class AdminClient:
    """Needs a key marked `admin`. Every method raises `CallError`. Made by `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def drain(self, timeout_s: float | None = None) -> int:
        """Let the server take no new request, and wait until those that run have ended; returns how many still run.

        timeout_s: how long to wait at most; None: as long as the server does at its end.
        """
        request = pb.DrainRequest(timeout_s=timeout_s)
        response = await self._connection.unary(self._stub.Drain, request)
        return int(response.running)

    async def flush_cache(self) -> int:
        """Forget every cached prefix that no running request uses; returns how many pages that frees."""
        return int((await self._connection.unary(self._stub.FlushCache, pb.FlushCacheRequest())).pages)

    async def swap_draft(self, draft: str = "", dtype: str = "") -> tuple[str | None, tuple[str, ...]]:
        """Change the draft model, or drop it (empty); returns its name and the drafters loaded now."""
        request = pb.SwapDraftRequest(draft=draft, dtype=dtype)
        response = await self._connection.unary(self._stub.SwapDraft, request)
        return (response.draft if response.HasField("draft") else None), tuple(response.drafters)

    @property
    def _stub(self) -> pb_grpc.AdminServiceAsyncStub:
        return pb_grpc.AdminServiceStub(self._connection.channel)
