"""CompletionService: code completion over the completion core."""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import AsyncIterator
from typing import Any

import grpc

from server.auth.caller import current_caller
from server.completion.completion_service import CompletionService
from server.frontend import Frontend
from server.grpc.completion_convert import acceptance_message, event_message
from server.grpc.completion_reader import check_model, read_options, read_outcome
from server.grpc.completion_session import CompletionSession
from server.grpc.errors import guarded
from server.grpc.request_reader import read_gap, read_prediction
from server.grpc.validation import validate
from server.request_errors import DeadlinePassedError
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import completion_pb2_grpc as pb_grpc
from specdec.errors import ViolationCollector
from specdec.types import Finished, FinishReason, Request

Context = grpc.aio.ServicerContext[Any, Any]


class CompletionServicer(pb_grpc.CompletionServiceServicer):
    """However a call ends, the run that it reads is left, and ends unless somebody else reads it."""

    def __init__(self, frontend: Frontend, service: CompletionService) -> None:
        self._frontend, self._service = frontend, service

    @guarded
    async def Complete(self, request: pb.CompleteRequest, context: Context) -> None:  # type: ignore[override]
        """One completion, as it is made."""
        with self._frontend.gate.enter():
            principal, service = current_caller(), self._service
            asked = await self._read(request, context)
            key = request.scheduling.supersedes_key
            run, _ = await service.runs.start(principal, asked, key)
            try:
                async for event in run.read():
                    if isinstance(event, Finished) and event.reason is FinishReason.DEADLINE:
                        raise DeadlinePassedError
                    await context.write(event_message(event, asked.request_id, self._frontend.info.target))
            finally:
                run.leave()
            owner = service.owner(principal, asked.cache_salt)
            service.outcomes.suggested(owner, asked.request_id, asked.session, len(run.text))

    @guarded
    async def CompleteSession(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.CompleteSessionRequest], context: Context
    ) -> None:
        """An editor's stream."""
        await CompletionSession(self._service, self._frontend).run(request_iterator, context)

    @guarded
    async def ReportOutcome(self, request: pb.ReportOutcomeRequest, context: Context) -> pb.ReportOutcomeResponse:
        """What became of a suggestion."""
        outcome, accepted, shown_ms = read_outcome(request)
        outcomes = self._service.outcomes
        owner = self._service.owner(current_caller(), request.cache.salt)
        known = outcomes.report(owner, request.suggestion_id, outcome, accepted, shown_ms)
        session = outcomes.session_of(owner, request.suggestion_id)
        figures = outcomes.of_session(owner, session) if session else None
        return pb.ReportOutcomeResponse(
            known=known, session=None if figures is None else acceptance_message(figures)
        )  # fmt: skip

    async def _read(self, message: pb.CompleteRequest, context: Context) -> Request:
        """The request that ``message`` comes to, with what is left of the call's time.

        Raises:
            RequestError: it can not be served; every bad field is named.
        """
        check_model(message.model, self._frontend)
        seen = ViolationCollector()
        options = read_options(message, seen)
        seen.check(message.HasField("fim"), "fim", "must be set")
        prediction = await read_prediction(message, self._frontend, seen)
        request_id = message.request_id or uuid.uuid4().hex
        request = await self._service.maker.make(read_gap(message.fim), options, current_caller(), request_id)
        request = dataclasses.replace(request, prediction_ids=prediction)
        validate(request, self._frontend.info, seen)
        remaining = context.time_remaining()
        if remaining is None:
            return request
        if remaining <= 0:
            raise DeadlinePassedError
        return dataclasses.replace(request, deadline_s=remaining)
