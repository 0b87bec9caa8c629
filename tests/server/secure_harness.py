"""A gRPC server with keys, TLS and operators' calls, over an engine in a real child process."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health, health_pb2_grpc

from server.admission import Admission
from server.auth.access import Access
from server.body_budget import BodyBudget
from server.engine_client import EngineClient
from server.grpc.admin_servicer import AdminServicer
from server.grpc.generation_servicer import GenerationServicer, ModelServicer
from server.grpc.interceptors import CallInterceptor
from server.grpc.server import add_reflection
from server.observe.observer import Observer
from server.served_model import Models, ServedModel
from specdec.api.v1 import admin_pb2_grpc, generation_pb2, generation_pb2_grpc, model_pb2_grpc
from specdec.config import Config
from tests.fake_engine import ADMIN
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import make_client, make_config


@dataclass
class SecureServer:
    """A running server; ``address`` is one of this machine."""

    client: EngineClient
    model: ServedModel
    access: Access
    admission: Admission
    address: str

    @asynccontextmanager
    async def stubs(
        self, key: str | None = None, credentials: grpc.ChannelCredentials | None = None
    ) -> AsyncIterator[Any]:
        """Stubs of every service, as attributes; each call carries ``key``."""
        options = [("grpc.ssl_target_name_override", "localhost")] if credentials else []
        interceptors = [] if key is None else [_Bearer(key), _StreamBearer(key)]
        if credentials is None:
            channel = grpc.aio.insecure_channel(self.address, interceptors=interceptors)
        else:
            channel = grpc.aio.secure_channel(self.address, credentials, options, interceptors=interceptors)
        async with channel:
            yield _Stubs(channel)


class _Stubs:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)
        self.admin = admin_pb2_grpc.AdminServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)


class _Bearer(grpc.aio.UnaryUnaryClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_unary(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_key(details, self._key), request)


class _StreamBearer(grpc.aio.UnaryStreamClientInterceptor):
    def __init__(self, key: str) -> None:
        self._key = key

    async def intercept_unary_stream(self, continuation: Any, details: Any, request: Any) -> Any:
        return await continuation(_with_key(details, self._key), request)


def _with_key(details: Any, key: str) -> Any:
    metadata = grpc.aio.Metadata(*(details.metadata or ()), ("authorization", f"Bearer {key}"))
    return details._replace(metadata=metadata)


@asynccontextmanager
async def secure_server(
    config: Config | None = None,
    *,
    factory: str = ADMIN,
    tokenizer: Callable[[], Any] = FakeTokenizer,
    wait: bool = True,
    **server: Any,
) -> AsyncIterator[SecureServer]:
    """A server of ``config``, or of these values of `ServerConfig`; ready unless not to ``wait``."""
    config = config or make_config(**server)
    client = make_client(config, factory=factory)
    model = ServedModel(client, config.server)
    access, models = model.access, Models([model])
    own = grpc.aio.server(interceptors=[CallInterceptor(access, Observer(), BodyBudget())])
    probes = health.aio.HealthServicer()
    generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(models), own)
    model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(models), own)
    admin_pb2_grpc.add_AdminServiceServicer_to_server(
        AdminServicer(models, probes.enter_graceful_shutdown, config.server.drain_s), own
    )
    health_pb2_grpc.add_HealthServicer_to_server(probes, own)
    service = generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name
    add_reflection((service,), own)
    port = access.listen(own, f"{config.server.host}:0")
    await own.start()
    await client.engine.start()
    try:
        if wait:
            await client.engine.wait_ready()
            model.load(tokenizer())
        yield SecureServer(client, model, access, model.admission, f"127.0.0.1:{port}")
    finally:
        await own.stop(0)
        await client.engine.close()
