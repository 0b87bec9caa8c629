"""One HTTP call: what the client sent, the way back to it, what calls share, and the endpoint that answers it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from email.utils import formatdate
from functools import cached_property
from typing import Any

from starlette.datastructures import QueryParams
from starlette.types import Receive, Scope, Send

from server.hold_headers import HOLD_HEADER, holds
from server.http.errors import CallRefusedError, ClientGoneError, Refusal
from server.http.fields import ignored_fields
from server.json_body import (
    LARGE_BYTES,
    MAX_COST,
    Body,
    RequestFields,
    Schema,
    Table,
    parsing_costs,
    read_object,
    read_request,
    write_json,
)
from server.observe.records import MAX_ID_CHARACTERS, REQUEST_ID_HEADER, call_id
from server.request_fields import NO_PROMPT, schemas, with_fields
from server.served_model import Models, ServedModel, Task
from specdec.core.fields import MAX_PROMPT_TOKENS
from specdec.core.types import Request
from specdec.engine.validation import check_requests
from specdec.errors import FieldViolation, InvalidRequestError, ViolationCollector


@dataclass(frozen=True, slots=True)
class ServerContext:
    """What the HTTP calls of one server share."""

    models: Models
    max_body_bytes: int
    call_ids: set[str] = field(default_factory=set)  # of calls in progress
    large_bodies: asyncio.Lock = field(default_factory=asyncio.Lock)  # held while a large body is parsed


BODY_IDLE_S = 30.0  # between two pieces of a body
_COUNTED = 1 << 16  # bytes of a large body between two turns of other calls
LINGER_S = 2.0  # reading the rest of a body that is refused
SILENT_S = 15.0  # of a stream, after which it gets a comment: proxies cut off what is silent for a minute
JSON, EVENT_STREAM = b"application/json", b"text/event-stream"
Headers = Sequence[tuple[bytes, bytes]]


class Call:
    """One HTTP call."""

    def __init__(self, scope: Scope, receive: Receive, send: Send, server: ServerContext) -> None:
        self._scope, self._receive, self._send = scope, receive, send
        self.path_params: dict[str, str] = scope.get("path_params", {})  # values of the path's placeholders
        self.content = b""  # the body, once it is read
        self._request_id = ""
        self.server = server
        self.model: ServedModel = server.models.first  # the one that the call means
        self.field_names: dict[str, str] = {}  # the body's names by the engine's; filled while the body is read
        self.supersedes_key = ""  # this call's request replaces the running one with the same key
        self.holds_headers = False  # a stream's headers wait for the first token
        self.broken: Callable[[Refusal], bytes] | None = None  # writes the end of a broken stream; None: the dialect
        self.fields: Table = ()  # those that the endpoint reads
        self._warnings: list[FieldViolation] = []  # added while the body is read
        self.began = False  # the answer's headers are sent
        self._n_written = 0  # pieces of a stream
        self._comments: asyncio.Task[None] | None = None  # writes into a silent stream

    @cached_property
    def query(self) -> QueryParams:
        """The query's fields; the last one of each name."""
        return QueryParams(self._scope["query_string"])

    def header(self, name: str) -> str:
        """A header of the request, or an empty string."""
        wanted = name.encode()
        return next((value.decode("latin-1") for key, value in self._scope["headers"] if key == wanted), "")

    @property
    def request_id(self) -> str:
        """The id in the call's ``x-request-id``, which `HttpCalls` adds where it is missing and repeats in the answer.
        It gets a random suffix if another call in progress has it: service meshes give one id to all calls of a user's
        request.

        Raises:
            InvalidRequestError: it is too long.
        """
        if not self._request_id:
            given = self.header(REQUEST_ID_HEADER)
            if len(given) > MAX_ID_CHARACTERS:
                raise InvalidRequestError.of(REQUEST_ID_HEADER, f"at most {MAX_ID_CHARACTERS} characters")
            given = call_id(given)
            if given in self.server.call_ids:
                end = f"-{uuid.uuid4().hex[:8]}"
                given = given[: MAX_ID_CHARACTERS - len(end)] + end
            self._request_id = given
            self.server.call_ids.add(self._request_id)
        return self._request_id

    @cached_property
    def data(self) -> dict[str, Any]:
        """The body's JSON object.

        Raises:
            InvalidRequestError: it is not one.
        """
        return read_object(self.content)

    def notes(self) -> dict[str, Any]:
        """Further fields of the answer: ``warnings``, if parts of the body have no effect, or another than expected."""
        if not self.fields:
            return {}
        ignored = ignored_fields(self.data, self.fields)
        found = [{"param": name, "message": f"{problem}, and was ignored"} for name, problem in ignored]
        found += [{"param": each.field, "message": each.description} for each in self._warnings]
        return {"warnings": found} if found else {}

    async def read_request(self, table: Table) -> tuple[Body, RequestFields]:
        """The body, and what it asks for by the names of a dialect's ``table``.

        Raises:
            InvalidRequestError: the body is not a JSON object.
            UnknownModelError: it names another model.
            RequestError: its prediction cannot be encoded.
        """
        model = self.model
        body = Body(self.data, ViolationCollector(warnings=self._warnings), self.field_names)
        if model.strict_fields:
            for name, problem in ignored_fields(self.data, self.fields, every=True):
                body.refuse(name, problem)
        fields = read_request(body, table)
        own, engine = fields.own, fields.engine
        model.check_name(own.get("model") or own.get("name"))
        self.supersedes_key = own.get("supersedes_key", "")
        stops = engine["stopping.stop"] = tuple(dict.fromkeys(engine.get("stopping.stop", ())))
        # A stop string that names a special token also stops at that token, which text may leave out.
        special = map(model.tokenizer.loaded.special_id, stops)
        fields.stop_at(token for token in special if token is not None)
        engine.setdefault("session", self.header("x-session-id"))
        if prediction := own.get("prediction"):
            engine["prediction_ids"] = await model.tokenizer.encode_prediction(prediction)
        self.holds_headers = holds(self.header(HOLD_HEADER), model.hold_headers)
        return body, fields

    def checked_request(self, request_id: str, body: Body, fields: RequestFields, ids: tuple[int, ...]) -> Request:
        """The request for the prompt ``ids``. Without a prompt, the other fields of a wrong body are still checked.

        Raises:
            RequestError: it cannot be served; the error names every bad field.
        """
        if fields.engine.get("sampling.thinking_budget", -1) >= 0:
            name = body.names["sampling.thinking_budget"]
            if fields.engine.get("grammar") is not None:
                body.warn(name, "has no effect with a grammar, which begins with the answer")
            elif self.model.tokenizer.loaded.thought_marks is None:
                body.warn(name, "has no effect: the model does not mark its thoughts")
        prompt = ids or (NO_PROMPT if body.violations.found else ())
        request = fields.request(request_id, prompt)
        check_requests([request], self.model.info, body.violations)
        return request

    async def read(self) -> None:
        """Receive the body.

        Raises:
            CallRefusedError: it is too long or compressed, or does not arrive in time.
            InvalidRequestError: it is long, and has too many values or is not a JSON object.
            ClientGoneError: the client left.
        """
        limit = self.server.max_body_bytes
        pieces: list[bytes] = []
        size, more = 0, True
        while more:
            data, more = await self._receive_piece()
            pieces.append(data)
            size += len(data)
            if size > limit:
                await self._swallow(more)
                problem = f"the body exceeds {limit} bytes; shorten it"
                raise CallRefusedError(413, "BODY_TOO_LARGE", problem)
        coding = self.header("content-encoding")
        if size and coding.lower() not in ("", "identity"):
            problem = f"content-encoding: {coding[:64]!r} is not read here; send the body without it"
            raise CallRefusedError(415, "BODY_CODING", problem, "content-encoding")
        self.content = b"".join(pieces)
        if size <= LARGE_BYTES:
            return
        pieces.clear()
        async with self.server.large_bodies:  # large bodies are parsed one at a time, and other calls run in between
            for cost in parsing_costs(self.content[at : at + _COUNTED] for at in range(0, size, _COUNTED)):
                if cost > MAX_COST:
                    problem = f"has too many values; send at most {MAX_PROMPT_TOKENS} numbers, or fewer other values"
                    raise InvalidRequestError.of("body", problem)
                await asyncio.sleep(0)
            _ = self.data
            await asyncio.sleep(0)

    def ended(self) -> None:
        """Free the id for the next call."""
        self.server.call_ids.discard(self._request_id)
        self._end_comments()

    async def gone(self) -> None:
        """Wait until the client has left. The body must have been read."""
        while (await self._receive())["type"] != "http.disconnect":
            pass

    async def reply(self, status: int, content: Any, headers: Headers = ()) -> None:
        """Answer with ``content`` as JSON."""
        await self.reply_data(status, write_json(content), JSON, headers)

    async def reply_data(self, status: int, data: bytes, media_type: bytes, headers: Headers = ()) -> None:
        """Answer with ``data``."""
        await self._start(status, [(b"content-type", media_type), (b"content-length", b"%d" % len(data)), *headers])
        await self.finish(data)

    async def start_stream(self, media_type: bytes) -> None:
        """Answer 200 with a body that `write` and `finish` send. Server-sent events get a comment, which clients skip,
        after one to two `SILENT_S` without a piece, such as while a long prompt is read."""
        await self._start(
            200, [(b"content-type", media_type), (b"cache-control", b"no-cache"), (b"x-accel-buffering", b"no")]
        )
        if media_type == EVENT_STREAM:
            self._comments = asyncio.create_task(self._write_comments())

    async def write(self, data: bytes) -> None:
        """Send the next piece of the answer; waits for a slow client."""
        self._n_written += 1
        await self._send({"type": "http.response.body", "body": data, "more_body": True})

    async def finish(self, data: bytes = b"") -> None:
        """Send the last piece of the answer."""
        self._end_comments()
        await self._send({"type": "http.response.body", "body": data, "more_body": False})

    async def _write_comments(self) -> None:
        while True:
            before = self._n_written
            await asyncio.sleep(SILENT_S)
            if self._n_written == before:
                await self.write(b":\n\n")

    def _end_comments(self) -> None:
        if self._comments is not None:
            self._comments.cancel()

    async def _start(self, status: int, headers: list[tuple[bytes, bytes]]) -> None:
        self.began = True
        named = [(b"date", formatdate(usegmt=True).encode()), *headers]
        await self._send({"type": "http.response.start", "status": status, "headers": named})

    async def _receive_piece(self) -> tuple[bytes, bool]:
        """The next piece of the body, and whether there is more."""
        try:
            async with asyncio.timeout(BODY_IDLE_S):
                message = await self._receive()
        except TimeoutError:
            problem = f"the rest of the body did not arrive within {BODY_IDLE_S:g} s; send it again"
            raise CallRefusedError(408, "BODY_TIMEOUT", problem) from None
        if message["type"] == "http.disconnect":
            raise ClientGoneError
        return message.get("body", b""), message.get("more_body", False)

    async def _swallow(self, more: bool) -> None:
        """Read on for `LINGER_S`: a client that is cut off while it sends may never read the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(LINGER_S):
                while more:
                    _, more = await self._receive_piece()


@dataclass(frozen=True, slots=True)
class ErrorStyle:
    """A dialect's form of a refusal."""

    body: Callable[[Refusal], Any]  # as JSON
    event: Callable[[Any], bytes]  # the body as the end of a stream that fails after its first byte


RESPONSES: Schema = {
    "200": {"description": "The answer; server-sent events if a stream was requested."},
    "4XX": {"description": "Refused; the body says why. 422: the model cannot fill in. 429: retry later."},
    "5XX": {"description": "503: loading or draining; retry later."},
}


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One method of one path. Endpoints of several dialects may share both: the first whose ``claims`` accepts the body
    answers, else the last."""

    method: str
    path: str
    answer: Callable[[Call], Coroutine[Any, Any, None]]  # answers a call, or raises a `RequestError`
    errors: ErrorStyle
    summary: str
    fields: Table = ()  # of the body's JSON object
    required: tuple[str, ...] = ()  # names of fields
    claims: Callable[[Mapping[str, Any]], bool] | None = None
    task: Task = Task.ANY  # selects a model if the call names none
    gated: bool = False  # calls run inside the model's `DrainGate`: they have requests in the engine
    parameters: Sequence[Schema] = ()  # of the path and the query, as OpenAPI describes them
    body: Schema | None = None  # OpenAPI's description of a body that is no table of fields

    @property
    def operation(self) -> dict[str, Any]:
        """The endpoint in OpenAPI."""
        found: dict[str, Any] = {"summary": self.summary, "responses": RESPONSES}
        if self.parameters:
            found["parameters"] = self.parameters
        if self.fields:
            schema = with_fields(schemas(self.fields), *self.required)
            found["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
        elif self.body is not None:
            found["requestBody"] = self.body
        return found
