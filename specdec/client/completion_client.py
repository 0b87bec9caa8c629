"""CompletionService, for editors."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Literal, Unpack

from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import completion_pb2_grpc as pb_grpc
from specdec.client.completion_hints import CompletionHints
from specdec.client.connection import Connection
from specdec.client.fim import Fim
from specdec.client.generate_options import GenerateOptions
from specdec.client.requests import completion_message
from specdec.client.results import event_of
from specdec.client.session_call import SessionCall
from specdec.types import RequestEvent

Outcome = Literal["shown", "accepted", "partially_accepted", "rejected"]
_AS_CONFIGURED = CompletionHints()


class CompletionClient:
    """Every method raises `CallError`. Made by `Client`."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    async def complete(
        self, gap: Fim, hints: CompletionHints = _AS_CONFIGURED, **options: Unpack[GenerateOptions]
    ) -> AsyncGenerator[RequestEvent, None]:
        """What belongs into ``gap``, as `Client.stream` gives it. Without ``sampling`` it is greedy, without
        ``stopping`` at most 128 tokens long."""
        request_id = options["request_id"] = options.get("request_id") or uuid.uuid4().hex
        message = completion_message(gap, hints, options)
        method = self._stub.Complete
        async with aclosing(self._connection.stream(method, message, options.get("timeout_s"))) as responses:
            async for response in responses:
                event = event_of(response, request_id)
                if event is not None:
                    yield event

    def session(self) -> SessionCall:
        """A stream of an editor's own; its first message must be a setup."""
        return SessionCall(self._connection.both_ways(self._stub.CompleteSession), self._connection.address)

    async def report_outcome(
        self,
        suggestion_id: str,
        outcome: Outcome,
        *,
        accepted_characters: int = 0,
        shown_ms: float = 0.0,
        cache_salt: str = "",
    ) -> bool:
        """Tell what became of a suggestion (of `complete`: its request id); False when it is not remembered."""
        request = pb.ReportOutcomeRequest(
            suggestion_id=suggestion_id, outcome=pb.Outcome.Value(f"OUTCOME_{outcome.upper()}"),
            accepted_characters=accepted_characters, shown_ms=shown_ms,
        )  # fmt: skip
        request.cache.salt = cache_salt
        return bool((await self._connection.unary(self._stub.ReportOutcome, request)).known)

    @property
    def _stub(self) -> pb_grpc.CompletionServiceAsyncStub:
        return pb_grpc.CompletionServiceStub(self._connection.channel)
