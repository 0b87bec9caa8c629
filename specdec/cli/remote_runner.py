"""Runs one request on a server, or reads its decision trace."""

from __future__ import annotations

from collections.abc import Generator
from types import TracebackType

import grpc
from google.rpc.error_details_pb2 import BadRequest
from google.rpc.status_pb2 import Status

from server.grpc.client_convert import event_from_message, stream_request
from server.grpc.trace_convert import trace_from_message
from specdec.api.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc, trace_pb2, trace_pb2_grpc
from specdec.api.v1 import options_pb2 as options
from specdec.cli.ask import Ask
from specdec.errors import SpecdecError
from specdec.types import RequestEvent, StepTrace

_CONNECT_S = 10.0


class ServerError(SpecdecError):
    """A server refused a request, or can not be reached."""


class RemoteRunner:
    """Use as a context manager; leaving ``events`` early cancels the call."""

    def __init__(self, address: str) -> None:
        self._address = address
        self._channel = grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)])
        self._generation = generation_pb2_grpc.GenerationServiceStub(self._channel)
        self._models = model_pb2_grpc.ModelServiceStub(self._channel)
        self._traces = trace_pb2_grpc.TraceServiceStub(self._channel)

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._channel.close()

    @property
    def model(self) -> str:
        """The target's name.

        Raises:
            ServerError: the server can not be reached, or is not ready.
        """
        try:
            return self._models.GetServerInfo(model_pb2.GetServerInfoRequest(), timeout=_CONNECT_S).target
        except grpc.RpcError as error:
            raise self._explained(error) from None

    def trace(self, limit: int) -> list[StepTrace]:
        """The last ``limit`` steps of the server's engine, newest last.

        Raises:
            ServerError: the server can not be reached, is not ready, or refuses ``limit``.
        """
        try:
            response = self._traces.GetTrace(trace_pb2.GetTraceRequest(limit=limit), timeout=_CONNECT_S)
        except grpc.RpcError as error:
            raise self._explained(error) from None
        return [trace_from_message(step) for step in response.steps]

    def events(self, ask: Ask) -> Generator[RequestEvent, None, None]:
        """Everything about one request, in order.

        Raises:
            ServerError: it is refused, or fails.
        """
        message = stream_request(ask.request)
        message.request_id = ask.request.request_id
        if ask.chat:
            message.chat.messages.append(options.ChatMessage(role="user", content=ask.prompt))
        else:
            message.text = ask.prompt
        if ask.prediction:
            message.prediction.text = ask.prediction
        call = self._generation.GenerateStream(message, timeout=ask.request.deadline_s)
        try:
            for response in call:
                event = event_from_message(response, ask.request.request_id)
                if event is not None:
                    yield event
        except grpc.RpcError as error:
            raise self._explained(error) from None
        finally:
            call.cancel()

    def _explained(self, error: grpc.RpcError) -> ServerError:
        """The status as one line, every bad field in it."""
        assert isinstance(error, grpc.Call)  # what a stub raises is the call itself
        code, details = error.code(), error.details() or ""
        trailers = dict(error.trailing_metadata() or ())
        packed = trailers.get("grpc-status-details-bin")
        if packed is None and code == grpc.StatusCode.UNAVAILABLE:
            return ServerError(f"no specdec server answers at {self._address}; start one with `specdec serve`")
        for detail in Status.FromString(packed).details if packed is not None else ():
            bad = BadRequest()
            if detail.Is(BadRequest.DESCRIPTOR):
                detail.Unpack(bad)
                details = "; ".join(f"{v.field}: {v.description}" for v in bad.field_violations)
        return ServerError(f"{code.name}: {details}")
