"""Asks every gRPC call for its key, before anything of it is read."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

import grpc
from grpc_health.v1 import health
from grpc_reflection.v1alpha import reflection

from server.auth.access import Access
from server.auth.caller import set_caller
from server.auth.principal import ANYBODY, Principal
from server.grpc.errors import refuse
from specdec.errors import RequestError

if TYPE_CHECKING:
    Handler = grpc.RpcMethodHandler[Any, Any]
    Details = grpc.HandlerCallDetails


class AuthInterceptor(grpc.aio.ServerInterceptor):
    """The servicers find who calls with `server.auth.caller.current_caller`. Health and reflection are open to anybody
    where the configuration says so."""

    def __init__(self, access: Access) -> None:
        self._access = access
        services = [health.SERVICE_NAME] if access.open_health else []
        services += [reflection.SERVICE_NAME] if access.open_reflection else []
        self._open = tuple(f"/{service}/" for service in services)

    async def intercept_service(
        self, continuation: Callable[[Details], Awaitable[Handler | None]], handler_call_details: Details
    ) -> Handler | None:
        """The method's own handler, or one that refuses; None for a method that is not served."""
        try:
            set_caller(await self._caller(handler_call_details))
        except RequestError as error:
            return _refusing(error)
        return await continuation(handler_call_details)

    async def _caller(self, details: Details) -> Principal:
        if details.method.startswith(self._open):
            return ANYBODY
        metadata = {name: value for name, value in details.invocation_metadata or () if isinstance(value, str)}
        return await self._access.caller(metadata.get("authorization"), metadata.get("x-api-key"))


def _refusing(error: RequestError) -> Handler:
    """Serves a method of any kind: to be refused, a call's messages need not be read."""

    async def call(_: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await refuse(context, error)

    handler: Handler = grpc.stream_stream_rpc_method_handler(call)
    return handler
