"""CompletionService: single completions, and sessions that follow an editor over one stream."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from dataclasses import replace
from functools import partial

from server.auth.principal import current_caller, set_caller
from server.completion.documents import FillMode, Gap, OffsetUnit, TextDocument, TextEdit, check_length, place_of
from server.completion.editor_session import EditorSession
from server.completion.next_edit import EditPrompt, EditReader
from server.completion.prompt_packer import FimNotSupportedError
from server.completion.requests import CompletionOptions
from server.errors import DrainingError
from server.grpc.completion_messages import (
    ask_refused,
    edit_messages,
    read_edit_request,
    read_limits,
    read_options,
    read_outcome,
    read_place,
    read_unit,
    suggestion_dropped,
    suggestion_finished,
    suggestion_started,
)
from server.grpc.errors import Context
from server.grpc.messages import event_message
from server.grpc.request_reader import admit, holds_headers, read_files, read_gap, read_prediction, validate
from server.hold_headers import from_first_token
from server.served_model import Models, ServedModel, Task
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import completion_pb2_grpc as pb_grpc
from specdec.api.v1 import result_pb2 as result
from specdec.core.types import Delta, Request
from specdec.errors import EngineDeadError, InvalidRequestError, RequestError, ViolationCollector

_WAITING = 64  # messages that wait for a slow reader; beyond, its own are not read
_FEW_EDITS = 16  # of a document; more are applied in a thread, since each may move all of its text


class CompletionSession:
    """Reads messages in one task, answers the current request in another, and writes in the call's own task.

    So a newer request never waits for an older one, and no write is interrupted.
    """

    def __init__(self, models: Models, context: Context) -> None:
        self._models, self._context = models, context
        self._model = models.first
        self._out: asyncio.Queue[pb.CompleteSessionResponse | BaseException | None] = asyncio.Queue(_WAITING)
        self._session: EditorSession | None = None
        self._owner = ""  # scope of the session and its suggestions
        self._options, self._unit, self._supersedes_key = CompletionOptions(), OffsetUnit.CODE_POINT, ""
        self._asked: asyncio.Task[None] | None = None
        self._ask_id, self._reading_ahead = 0, False  # of the current request; whether it is to read ahead

    async def run(self, messages: AsyncIterator[pb.CompleteSessionRequest]) -> None:
        """Serve until the client has closed its side and has all answers, or has left.

        Raises:
            UnauthenticatedError: the key was revoked.
            RequestError: the first message is no setup, the engine is dead, or the server shuts down.
        """
        reading = asyncio.create_task(self._read(messages), name="completion-session")
        try:
            while (item := await self._out.get()) is not None:
                if isinstance(item, BaseException):
                    raise item
                await self._context.write(item)
        finally:
            for task in (reading, self._asked):
                if task is not None:
                    task.cancel()
            if self._session is not None:
                self._session.stop()

    async def _read(self, messages: AsyncIterator[pb.CompleteSessionRequest]) -> None:
        try:
            async for message in messages:
                await self._take(message)
            if self._asked is not None:
                await asyncio.wait([self._asked])
            await self._out.put(None)
        except Exception as error:  # raised again in the call's own task
            await self._out.put(error)

    async def _take(self, message: pb.CompleteSessionRequest) -> None:
        if message.HasField("setup"):
            await self._set_up(message.setup)
        session = self._session
        if session is None:
            raise InvalidRequestError.of("setup", "the first message must set up the session")
        self._model.sessions.used(self._owner, session)
        action, ask_id = message.WhichOneof("action"), message.ask.id
        was_reading = self._reading_ahead
        if action == "ask" or message.cancel:
            await self._drop(result.FINISH_REASON_SUPERSEDED if action == "ask" else result.FINISH_REASON_ABORTED)
        if action == "ask":
            # Since the call began, the key may have been revoked or its limits changed.
            set_caller(await self._models.first.access.grpc_caller(self._context.invocation_metadata()))
        try:
            known = await self._change(session, message)
            if action == "cancel" and not message.cancel:
                raise InvalidRequestError.of("cancel", "must be true; leave it out otherwise, also beside an ask")
            gap = self._gap(session, message.ask) if known and action == "ask" else None
        except RequestError as error:
            await self._out.put(ask_refused(ask_id, error))
            return
        if action == "cancel":
            if not was_reading:
                session.stop()
        elif not known or (action == "ask" and gap is None):
            await self._out.put(self._resync(session, message))
        elif gap is not None:
            self._ask_id, self._reading_ahead = ask_id, message.ask.read_ahead
            self._asked = asyncio.create_task(self._respond(session, ask_id, gap), name="completion-ask")

    async def _set_up(self, setup: pb.SessionSetup) -> None:
        if self._session is None:
            self._model = self._models.find(setup.model, Task.FILL)
        self._model.check_name(setup.model)
        violations = ViolationCollector()
        options, unit = read_options(setup, violations), read_unit(setup, violations)
        if self._session is not None:
            same_id = setup.session.id in ("", self._session.session_id)
            same = same_id and setup.cache.salt == self._options.base.cache_salt
            violations.check(same, "setup.session", "must stay the same in a stream; open another for another session")
        violations.raise_if_any()
        packer = self._model.maker.packer
        if options.mode is FillMode.MIDDLE and not packer.fills_in:
            raise FimNotSupportedError(
                "the model has no fill-in-the-middle tokens; serve one that was trained for it, or set "
                "setup.completion.mode to MODE_MIDDLE_OR_PREFIX or MODE_PREFIX"
            )
        owner = current_caller().scoped(options.base.cache_salt)
        session = self._session or self._model.sessions.open(owner, setup.session.id)
        self._session, self._unit, self._owner = session, unit, owner
        self._options = replace(options, base=replace(options.base, session=session.session_id))
        self._supersedes_key = setup.scheduling.supersedes_key
        held = {uri: document.version for uri, document in session.documents.items()}
        ready = pb.SessionReady(
            session_id=session.session_id, model=self._model.name, documents=held, fills_in=packer.fills_in
        )
        await self._out.put(pb.CompleteSessionResponse(ready=ready))

    async def _change(self, session: EditorSession, message: pb.CompleteSessionRequest) -> bool:
        """Apply a change to a document. Returns False if the edits are based on another version than the one held.

        Raises:
            InvalidRequestError: the change is invalid.
        """
        change, violations = message.WhichOneof("change"), ViolationCollector()
        if change == "text":
            violations.check(bool(message.text.uri), "text.uri", "must not be empty")
            check_length(message.text.text, "text.text", violations)
            violations.raise_if_any()
            document = TextDocument(message.text.text, message.text.version, message.text.language)
            session.keep(message.text.uri, document)
        elif change == "edits":
            held = session.documents.get(message.edits.uri)
            if held is None or held.version != message.edits.from_version:
                return False
            edits = [TextEdit(edit.start, edit.end, edit.text) for edit in message.edits.edits]
            apply = partial(held.apply, edits, message.edits.version, self._unit)
            if len(edits) > _FEW_EDITS:
                await asyncio.to_thread(apply)
            else:
                apply()
            session.keep(message.edits.uri, held)
        elif change == "close":
            session.documents.pop(message.close, None)
        return True

    def _gap(self, session: EditorSession, ask: pb.CompletionAsk) -> Gap | None:
        """Return the gap requested; None if the document's version is not the one held.

        Raises:
            InvalidRequestError: the place does not exist.
        """
        which = ask.WhichOneof("place")
        if which == "fim":
            return read_gap(ask.fim)
        if which is None:
            raise InvalidRequestError.of("ask.place", "one of cursor and fim is needed")
        document = session.documents.get(ask.cursor.uri)
        if document is None or document.version != ask.cursor.version:
            return None
        place = place_of(document.text, ask.cursor.offset, self._unit)
        if place is None:
            raise InvalidRequestError.of("ask.cursor.offset", "must lie in the document, between characters")
        prefix, suffix = document.around(place)
        return Gap(
            prefix, suffix, files=read_files(ask.extra), repo=ask.repo_name, path=ask.cursor.uri,
            language=document.language,
        )  # fmt: skip

    def _resync(self, session: EditorSession, message: pb.CompleteSessionRequest) -> pb.CompleteSessionResponse:
        uri = message.edits.uri if message.WhichOneof("change") == "edits" else message.ask.cursor.uri
        document = session.documents.get(uri)
        version = None if document is None else document.version
        return pb.CompleteSessionResponse(resync=pb.ResyncNeeded(ask_id=message.ask.id, uri=uri, version=version))

    async def _respond(self, session: EditorSession, ask_id: int, gap: Gap) -> None:
        """Answer a request, or read ahead for it. What refuses it alone is its answer; other errors end the session."""
        work = self._read_ahead if self._reading_ahead else self._answer
        try:
            await work(session, ask_id, gap)
        except RequestError as error:
            ends_session = isinstance(error, EngineDeadError | DrainingError)
            await self._out.put(error if ends_session else ask_refused(ask_id, error))
        except Exception as error:  # raised again in the call's own task
            await self._out.put(error)

    async def _answer(self, session: EditorSession, ask_id: int, gap: Gap) -> None:
        put = self._out.put
        with self._model.gate.enter():
            suggestion = await session.suggest(gap, self._options, self._check, self._supersedes_key)
            await put(suggestion_started(ask_id, suggestion))
            async for text in suggestion.texts():
                await put(pb.CompleteSessionResponse(delta=pb.SuggestionDelta(ask_id=ask_id, text=text)))
        if suggestion.text:
            self._model.outcomes.suggested(self._owner, suggestion.suggestion_id)
        await put(suggestion_finished(ask_id, suggestion))

    async def _read_ahead(self, session: EditorSession, ask_id: int, gap: Gap) -> None:
        with self._model.gate.enter():
            await session.read_ahead(gap, self._options, self._check)
        await self._out.put(suggestion_dropped(ask_id, result.FINISH_REASON_LENGTH))

    def _check(self, request: Request) -> None:
        """Raise why a request is refused, if it is."""
        if self._reading_ahead and self._model.gate.is_closed:  # a shutdown would wait for what no caller waits for
            raise DrainingError
        validate(request, self._model.info, ViolationCollector())

    async def _drop(self, reason: result.FinishReason.ValueType) -> None:
        """Stop answering the current request. Its generation continues until the session reuses or stops it."""
        asked, self._asked = self._asked, None
        if asked is not None:
            asked.cancel()
            await asyncio.wait([asked])
            self._reading_ahead = False
            if asked.cancelled():  # else its end is sent
                await self._out.put(suggestion_dropped(self._ask_id, reason))


class CompletionServicer(pb_grpc.CompletionServiceServicer):
    def __init__(self, models: Models) -> None:
        self._models = models

    async def Complete(self, request: pb.CompleteRequest, context: Context) -> None:  # type: ignore[override]
        model = self._models.find(request.model, Task.FILL)
        with model.gate.enter():
            principal = current_caller()
            asked = await _read(request, model)
            hold, has_text = holds_headers(model, context), False
            async with admit(model, asked, request.scheduling, context) as stream:
                async for event in from_first_token(stream, hold):
                    has_text = has_text or (isinstance(event, Delta) and event.index == 0 and event.text != "")
                    await context.write(event_message(pb.CompleteResponse, event, model.name))
            if has_text:
                model.outcomes.suggested(principal.scoped(asked.cache_salt), asked.request_id)

    async def CompleteSession(  # type: ignore[override]
        self, request_iterator: AsyncIterator[pb.CompleteSessionRequest], context: Context
    ) -> None:
        await CompletionSession(self._models, context).run(request_iterator)

    async def PredictEdit(self, request: pb.PredictEditRequest, context: Context) -> None:  # type: ignore[override]
        model = self._models.find(request.model)
        with model.gate.enter():
            principal, suggested = current_caller(), False
            asked, reader = await _read_edit(request, model)
            hold = holds_headers(model, context)
            owner = principal.scoped(asked.cache_salt)
            async with admit(model, asked, request.scheduling, context) as stream:
                async for event in from_first_token(stream, hold):
                    for message in edit_messages(event, reader, model.name):
                        if message.HasField("edit") and not suggested:  # it may be taken before the rest has come
                            suggested = True
                            model.outcomes.suggested(owner, asked.request_id)
                        await context.write(message)

    async def ReportOutcome(self, request: pb.ReportOutcomeRequest, context: Context) -> pb.ReportOutcomeResponse:
        outcome = read_outcome(request)
        outcomes = self._models.first.outcomes  # of all models
        known = outcomes.report(current_caller().scoped(request.cache.salt), request.suggestion_id, outcome)
        return pb.ReportOutcomeResponse(known=known)


async def _read(message: pb.CompleteRequest, model: ServedModel) -> Request:
    """Return the request in ``message``.

    Raises:
        RequestError: it cannot be served; every bad field is listed.
    """
    model.check_name(message.model)
    violations = ViolationCollector()
    options = read_options(message, violations)
    violations.check(message.HasField("fim"), "fim", "must be set")
    prediction = await read_prediction(message, model, violations)
    request_id = message.request_id or uuid.uuid4().hex
    request = await model.maker.make(read_gap(message.fim), options, request_id)
    request = replace(request, prediction_ids=prediction)
    validate(request, model.info, violations)
    return request


async def _read_edit(message: pb.PredictEditRequest, model: ServedModel) -> tuple[Request, EditReader]:
    """Return the request in ``message``, and what finds the edits in its answer; raises as `_read`."""
    model.check_name(message.model)
    violations = ViolationCollector()
    place, base = read_place(message, violations), read_edit_request(message, violations)
    budget, ttft_ms = read_limits(message, "", violations)
    violations.raise_if_any()
    prompt = EditPrompt(place, model.info.target, model.tokenizer.loaded, model.maker.packer)
    owner = current_caller().scoped(base.cache_salt)
    ttft = model.maker.time.objective(owner, ttft_ms)
    request = await asyncio.to_thread(prompt.request, base, owner, budget, ttft)
    validate(request, model.info, violations)
    return request, EditReader(prompt)
