"""The gRPC server: services, health, reflection, on one port."""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from server.grpc.admin_servicer import AdminServicer, ExperimentServicer, TraceServicer
from server.grpc.completion_servicer import CompletionServicer
from server.grpc.generation_servicer import GenerationServicer, ModelServicer
from server.grpc.interceptors import AuthInterceptor, GrpcCalls, UnreadableMessages
from server.grpc.reflection import add_reflection
from server.observe.observer import Observer
from server.served_models import Models
from specdec.api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    completion_pb2,
    completion_pb2_grpc,
    experiment_pb2,
    experiment_pb2_grpc,
    generation_pb2,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    trace_pb2,
    trace_pb2_grpc,
)
from specdec.config import ServerConfig
from specdec.errors import ConfigError

SERVICES = (
    generation_pb2.DESCRIPTOR.services_by_name["GenerationService"].full_name,
    completion_pb2.DESCRIPTOR.services_by_name["CompletionService"].full_name,
    model_pb2.DESCRIPTOR.services_by_name["ModelService"].full_name,
    trace_pb2.DESCRIPTOR.services_by_name["TraceService"].full_name,
    admin_pb2.DESCRIPTOR.services_by_name["AdminService"].full_name,
    experiment_pb2.DESCRIPTOR.services_by_name["ExperimentService"].full_name,
)
GONE_S, ANSWER_S = 60.0, 20.0  # after so much silence a client is asked whether it is there, and has so long to answer
MOST_STREAMS = 4096  # of a connection; more wait at the client
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Made not serving; `set_serving` says when it is, per service and over all."""

    def __init__(self, config: ServerConfig, models: Models, observer: Observer | None = None) -> None:
        access = models.first.frontend.access
        self._config, self._access, self.completion = config, access, models.first.completion
        self._drained: set[str] = set()
        self._health = health.aio.HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[GrpcCalls(observer or Observer()), AuthInterceptor(access), UnreadableMessages()],
            options=[
                ("grpc.max_receive_message_length", config.max_message_bytes),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", MOST_STREAMS),
                # Without this a second server takes the same port in silence, and half the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                # A client that is gone without a word, or never reads, would keep its streams for hours.
                ("grpc.keepalive_time_ms", round(GONE_S * 1e3)),
                ("grpc.keepalive_timeout_ms", round(ANSWER_S * 1e3)),
                ("grpc.http2.ping_timeout_ms", round(ANSWER_S * 1e3)),  # the same where no call waits for anything
            ],
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(models), self._server)
        completion_pb2_grpc.add_CompletionServiceServicer_to_server(CompletionServicer(models), self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(models), self._server)
        trace_pb2_grpc.add_TraceServiceServicer_to_server(TraceServicer(models), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(models, self.begin_shutdown, config.drain_s), self._server
        )
        experiment_pb2_grpc.add_ExperimentServiceServicer_to_server(ExperimentServicer(models), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if config.reflection:
            add_reflection((*SERVICES, health.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Begin to listen, not serving yet; returns the port.

        Raises:
            ConfigError: the address is in use or can not be had.
        """
        await self.set_serving(False)
        host, port = self._config.host, self._config.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        bound = self._access.listen(self._server, address)
        if bound == 0:
            raise ConfigError(f"gRPC can not listen on {address}: it is in use, or not an address of this machine")
        await self._server.start()
        return bound

    async def set_serving(self, serving: bool) -> None:
        """Tell health's watchers."""
        for service in ("", *SERVICES):
            await self._health.set(service, _SERVING if serving else _NOT_SERVING)

    async def set_model_serving(self, name: str, serving: bool) -> None:
        """Tell those who watch one of several models, by its name."""
        await self._health.set(name, _SERVING if serving and name not in self._drained else _NOT_SERVING)

    async def begin_shutdown(self, model: str = "") -> None:
        """Not serving from now on, whatever `set_serving` says later; calls are still answered. model: the name of one
        of several, and only that one."""
        if model:
            self._drained.add(model)
            await self.set_model_serving(model, False)
        else:
            await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port and end what is left after ``grace_s`` seconds."""
        await self._server.stop(grace_s)
