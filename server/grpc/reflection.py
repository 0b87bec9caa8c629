"""Reflection: which services and messages there are, as v1 and as v1alpha, which differ in the package's name alone."""

from __future__ import annotations

from collections.abc import Sequence

import grpc
from google.protobuf import descriptor_pool, text_format
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from grpc_reflection.v1alpha import reflection, reflection_pb2

V1ALPHA = reflection.SERVICE_NAME
V1 = V1ALPHA.replace("v1alpha", "v1")


def add_reflection(services: Sequence[str], server: grpc.aio.Server) -> None:
    """Let ``server`` tell of ``services``, and of reflection itself."""
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
    """Make the v1 file known, so that a client may ask what it holds: the package on hand has only v1alpha."""
    pool = descriptor_pool.Default()
    try:
        pool.FindServiceByName(V1)
    except KeyError:
        text = text_format.MessageToString(FileDescriptorProto.FromString(reflection_pb2.DESCRIPTOR.serialized_pb))
        v1 = text_format.Parse(text.replace("v1alpha", "v1"), FileDescriptorProto())
        pool.AddSerializedFile(v1.SerializeToString())
