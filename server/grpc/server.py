"""The gRPC server: services, health and reflection on one port."""

from __future__ import annotations

import socket
from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2

from server.body_budget import BodyBudget, connection_limit
from server.grpc.admin_servicer import AdminServicer, ExperimentServicer
from server.grpc.completion_servicer import CompletionServicer
from server.grpc.generation_servicer import GenerationServicer, HealthServicer, ModelServicer
from server.grpc.interceptors import METHODS, CallInterceptor
from server.observe.observer import Observer
from server.served_model import Models
from specdec.api.v1 import (
    admin_pb2_grpc,
    completion_pb2_grpc,
    experiment_pb2_grpc,
    generation_pb2_grpc,
    model_pb2_grpc,
)
from specdec.config import ServerConfig
from specdec.errors import ConfigError

SERVICES = tuple(dict.fromkeys(method.containing_service.full_name for method in METHODS.values()))
GONE_S = 60.0  # of silence after which the server pings a client
ANSWER_S = 20.0  # for the answer to a ping
HANDSHAKE_S = 10.0  # for a connection to begin HTTP/2
IDLE_S = 60.0  # without a call, after which a connection is closed: clients that never do so would shut others out
MAX_CALLS = 4096  # at once, over all connections; more are refused with RESOURCE_EXHAUSTED
MAX_STREAMS = 4096  # of one connection; more wait in the client
V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")
_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


class GrpcServer:
    """Health checks report what `report_health` last found."""

    def __init__(self, config: ServerConfig, models: Models, observer: Observer, budget: BodyBudget) -> None:
        self._config, self._access, self._models = config, models.first.access, models
        self.health = HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[CallInterceptor(self._access, observer, budget)],
            maximum_concurrent_rpcs=MAX_CALLS,
            options=[
                ("grpc.max_receive_message_length", budget.longest),
                ("grpc.max_send_message_length", -1),
                ("grpc.max_concurrent_streams", MAX_STREAMS),
                ("grpc.max_allowed_incoming_connections", connection_limit()),
                ("grpc.server_handshake_timeout_ms", round(HANDSHAKE_S * 1e3)),
                ("grpc.max_connection_idle_ms", round(IDLE_S * 1e3)),
                # A call whose message is not read yet may send as much, whatever the connection's speed.
                ("grpc.http2.bdp_probe", 0),
                # Without this, a second server shares the port silently and gets half the calls.
                ("grpc.so_reuseport", 0),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.min_recv_ping_interval_without_data_ms", 10_000),
                # A client that vanished or never reads would otherwise keep its streams for hours.
                ("grpc.keepalive_time_ms", round(GONE_S * 1e3)),
                ("grpc.keepalive_timeout_ms", round(ANSWER_S * 1e3)),
                ("grpc.http2.ping_timeout_ms", round(ANSWER_S * 1e3)),  # for idle connections
            ],
        )
        generation_pb2_grpc.add_GenerationServiceServicer_to_server(GenerationServicer(models), self._server)
        completion_pb2_grpc.add_CompletionServiceServicer_to_server(CompletionServicer(models), self._server)
        model_pb2_grpc.add_ModelServiceServicer_to_server(ModelServicer(models), self._server)
        admin_pb2_grpc.add_AdminServiceServicer_to_server(
            AdminServicer(models, self.report_health, config.drain_s), self._server
        )
        experiment_pb2_grpc.add_ExperimentServiceServicer_to_server(ExperimentServicer(models), self._server)
        health_pb2_grpc.add_HealthServicer_to_server(self.health, self._server)
        add_reflection((*SERVICES, health.SERVICE_NAME), self._server)

    async def start(self) -> int:
        """Listen, and return the port.

        Raises:
            ConfigError: the address is in use or not available.
        """
        await self.report_health()
        host, port = self._config.host, self._config.grpc_port
        address = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        _check_free(host, port, address)
        try:
            bound = self._access.listen(self._server, address)
        except RuntimeError:
            raise ConfigError(f"gRPC cannot listen on {address}; choose another with --grpc-port or --host") from None
        await self._server.start()
        return bound

    async def report_health(self) -> None:
        """Report whether the server is ready, and of each of several models whether it takes requests."""
        for service in ("", *SERVICES):
            await self.health.set(service, _SERVING if self._models.take_requests else _NOT_SERVING)
        for model in self._models if self._models.several else ():
            await self.health.set(model.names.own, _SERVING if model.takes_requests else _NOT_SERVING)

    async def stop(self, grace_s: float = 0.0) -> None:
        """Close the port; after ``grace_s`` seconds, cancel the calls that still run."""
        await self._server.stop(grace_s)


def _check_free(host: str, port: int, address: str) -> None:
    """Try the address on a plain socket first, because gRPC's library writes a log line of its own for a port in use.

    Raises:
        ConfigError: the address is in use or not of this machine.
    """
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as trial:
            trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            trial.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"gRPC cannot listen on {address}: {error.strerror}; choose another with --grpc-port or --host"
        ) from None


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Serve reflection of ``services`` as v1 and as v1alpha, which differ only in the package's name."""
    _describe_v1()
    servicer = reflection.aio.ReflectionServicer((*services, V1, V1ALPHA))
    method = grpc.stream_stream_rpc_method_handler(
        servicer.ServerReflectionInfo,
        request_deserializer=reflection_pb2.ServerReflectionRequest.FromString,
        response_serializer=reflection_pb2.ServerReflectionResponse.SerializeToString,
    )
    handlers = [grpc.method_handlers_generic_handler(name, {"ServerReflectionInfo": method}) for name in (V1, V1ALPHA)]
    server.add_generic_rpc_handlers(tuple(handlers))


def _describe_v1() -> None:
    """Register the v1 file, so that clients can ask for it: the package installed has only v1alpha."""
    text = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
    v1 = text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
    descriptor_pool.Default().AddSerializedFile(v1.SerializeToString())  # again for each server, which changes nothing
