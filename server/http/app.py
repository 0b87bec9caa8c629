"""All endpoints as one ASGI application: routing, choice of model, keys, errors, CORS, the OpenAPI document, and a
record of every call."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from starlette.applications import Starlette
from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import specdec
from server.auth.access import HEALTH_PATHS
from server.auth.principal import set_caller
from server.http.anthropic import ANTHROPIC, ANTHROPIC_ERRORS
from server.http.call import Call, Endpoint, ErrorStyle, ServerContext
from server.http.embeddings import EMBEDDINGS
from server.http.errors import CallRefusedError, ClientGoneError, path_not_found, refusal_of
from server.http.fields import MODEL_QUERY
from server.http.llamacpp import LLAMACPP
from server.http.mistral import MISTRAL
from server.http.ollama import OLLAMA, OLLAMA_ERRORS
from server.http.openai import OPENAI
from server.http.openai_format import OPENAI_ERRORS
from server.http.operator_endpoints import EXPERIMENTS, METRICS, PROBES
from server.http.playground import PLAYGROUND
from server.http.responses import OPENAI_RESPONSES
from server.http.sglang import SGLANG
from server.http.tabby import TABBY
from server.http.vllm import RENDER, VLLM
from server.json_body import write_json
from server.observe.observer import Observer
from server.observe.records import ARM_HEADER, MAX_ID_CHARACTERS, REQUEST_ID_HEADER
from server.served_model import ServedModel, Task
from specdec.errors import InvalidRequestError


class EndpointApp:
    """An ASGI application for endpoints that share a method and a path."""

    def __init__(self, endpoints: Sequence[Endpoint], server: ServerContext) -> None:
        self._endpoints, self._server = endpoints, server
        self.path = endpoints[0].path.replace(":path}", "}")  # as metrics name it

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call, endpoint = Call(scope, receive, send, self._server), self._endpoints[-1]
        try:
            access = self._server.models.first.access
            access.browsers.check(endpoint.method, call.header)
            set_caller(await access.http_caller(endpoint.path, call.header))
            await call.read()
            claiming = (each for each in self._endpoints if each.claims is not None and each.claims(call.data))
            endpoint = next(claiming, endpoint)
            call.fields = endpoint.fields
            names_model = MODEL_QUERY in endpoint.parameters and call.query.get("model")
            if names_model or (self._server.models.several and endpoint.path not in HEALTH_PATHS):
                call.model = model_of(call, endpoint)
            with call.model.gate.enter() if endpoint.gated else nullcontext():
                await _unless_gone(call, endpoint.answer(call))
        except ClientGoneError:
            return  # cancelling the endpoint has ended its requests in the engine
        except Exception as error:
            refusal, errors = refusal_of(error, call.field_names), endpoint.errors
            if call.began:
                await call.finish(call.broken(refusal) if call.broken else errors.event(errors.body(refusal)))
            else:
                await call.reply(refusal.status, errors.body(refusal), refusal.headers)
        finally:
            call.ended()


def model_of(call: Call, endpoint: Endpoint) -> ServedModel:
    """The model that the path, the body or the query names; without a name, the first that can do the endpoint's task.

    Raises:
        UnknownModelError: the query names an unknown model; the endpoint refuses other names.
        EngineDeadError: the models' names are not known yet.
    """
    try:
        body = call.data if call.content else {}
    except InvalidRequestError:  # the endpoint raises it again if it reads the body
        body = {}
    old = body.get("name") if endpoint.path.startswith("/api/") else None  # of older clients of Ollama
    named = (call.path_params.get("model"), body.get("model"), old, call.query.get("model"))
    asked = next((name for name in named if name and isinstance(name, str)), "")
    found = call.server.models.find(asked, Task.FILL if body.get("suffix") else endpoint.task)
    if queried := call.query.get("model"):
        found.check_name(queried)
    return found


async def _unless_gone(call: Call, work: Coroutine[Any, Any, None]) -> None:
    """Await ``work``, and cancel it when the client leaves.

    Raises:
        ClientGoneError: the client left.
        Exception: ``work`` raised it.
    """
    # The work runs in the current task: another one would cost every answer a turn of the event loop.
    try:
        async with asyncio.timeout(None) as scope:

            async def watch() -> None:
                await call.gone()
                scope.reschedule(asyncio.get_running_loop().time())

            watching = asyncio.create_task(watch())
            try:
                await work
            finally:
                watching.cancel()
    except TimeoutError:
        if scope.expired():
            raise ClientGoneError from None
        raise


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """The OpenAPI 3.1 document. If dialects share a path, all their bodies are valid; the last one is described."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        here, method = paths.setdefault(path, {}), endpoint.method.lower()
        here[method] = _joined(here[method], endpoint.operation) if method in here else endpoint.operation
    info = {"title": "specdec", "version": specdec.__version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths}


def _joined(first: Mapping[str, Any], last: Mapping[str, Any]) -> Mapping[str, Any]:
    """``last`` with the bodies of ``first`` allowed too."""
    bodies = [operation.get("requestBody") for operation in (first, last)]
    if None in bodies:
        return last
    schemas = [body["content"]["application/json"]["schema"] for body in bodies if body is not None]
    schemas = [*schemas[0].get("anyOf", [schemas[0]]), schemas[1]]
    return {**last, "requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": schemas}}}}}


# A dialect that claims its bodies precedes the one with which it shares a path.
DIALECTS: tuple[Endpoint, ...] = (
    *PROBES, *METRICS, *EXPERIMENTS, *TABBY, *OPENAI, *OPENAI_RESPONSES, *EMBEDDINGS, *ANTHROPIC,
    *VLLM, *SGLANG, *RENDER, *LLAMACPP, *MISTRAL, *OLLAMA,
)  # fmt: skip
ENDPOINTS = (*DIALECTS, *PLAYGROUND)


def build_app(server: ServerContext, endpoints: Iterable[Endpoint] = ENDPOINTS) -> Starlette:
    """The application that serves ``endpoints`` and their OpenAPI document."""
    served = [*endpoints]
    document = openapi_document(served)

    async def describe(call: Call) -> None:
        await call.reply(200, document)

    served.append(Endpoint("GET", "/openapi.json", describe, OPENAI_ERRORS, "This document"))
    groups: dict[str, dict[str, list[Endpoint]]] = {}
    for endpoint in served:
        groups.setdefault(endpoint.path, {}).setdefault(endpoint.method, []).append(endpoint)
    routes = [
        Route(path, EndpointApp(sharing, server), methods=[method])
        for path, methods in groups.items()
        for method, sharing in methods.items()
    ]
    return Starlette(routes=routes, exception_handlers={HTTPException: _refuse})


# The dialect of refusals for unknown paths, by prefix.
_STYLES: Mapping[str, ErrorStyle] = {"/api/": OLLAMA_ERRORS, "/v1/messages": ANTHROPIC_ERRORS}


async def _refuse(request: Request, error: Any) -> Response:
    """The answer to an unknown path or method."""
    path, headers = request.scope["path"], {}
    # A client's base URL may lack its /v1, have one too many, or end in a slash.
    served = {route.path for route in request.app.routes}
    meant = f"/v1{path}", path.removeprefix("/v1"), path.replace("//", "/")
    likely = next((each for each in meant if each in served), None)
    found = path_not_found(path, likely)
    if error.status_code == 405:
        # Starlette names the methods of one route only.
        methods = {name for route in request.app.routes if route.path_regex.match(path) for name in route.methods}
        headers["allow"] = ", ".join(sorted(methods))
        problem = f"{request.method[:20]} is not served here; use {headers['allow']}"
        found = CallRefusedError(405, "METHOD_NOT_ALLOWED", problem)
    refusal = refusal_of(found, {})
    style = next((style for prefix, style in _STYLES.items() if path.startswith(prefix)), OPENAI_ERRORS)
    return Response(write_json(style.body(refusal)), refusal.status, headers, "application/json")


_METHODS = ("DELETE", "GET", "HEAD", "POST")
# Headers that scripts may read
_SHOWN = ("x-request-id", "request-id", "retry-after", "retry-after-ms", "x-should-retry", "www-authenticate")


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app`` with CORS headers, so that browsers let scripts of ``origins`` call it (``*``: any origin).

    Preflight requests carry no key and are answered here. Credentials are not allowed: the server has no cookies, and
    scripts send a key in a header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=_SHOWN
    )


_REQUEST_ID = REQUEST_ID_HEADER.encode()
_ANTHROPIC_ID = b"request-id"
# A proxy's status for a client that has left; no client sees it.
_CLIENT_LEFT = "499"


class HttpCalls:
    """An ASGI application around ``app``, which gets paths without a slash at their end. Every answer carries an
    ``x-request-id``, the client's or a fresh one, and repeats it as ``request-id`` for Anthropic's clients."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app, self._observer = app, observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Starlette itself would redirect the client, behind a proxy with TLS to plain HTTP.
        scope["path"] = scope["path"].removesuffix("/") or "/"
        headers = Headers(scope=scope)
        with self._observer.call("http", scope["path"], lambda name: headers.get(name, "")) as record:
            record.status = _CLIENT_LEFT  # unless an answer begins
            given = headers.get(REQUEST_ID_HEADER, "").encode("latin-1")
            if not given:
                given = record.request_id.encode()
                # The call has one id everywhere, so the fresh id precedes a header that is missing or empty.
                scope["headers"] = [(_REQUEST_ID, given), *scope["headers"]]

            async def sending(message: Message) -> None:
                if message["type"] == "http.response.start":
                    record.status = str(message["status"])
                    own = [(_REQUEST_ID, given), (_ANTHROPIC_ID, given)] if len(given) <= MAX_ID_CHARACTERS else []
                    if record.arm:
                        own.append((ARM_HEADER.encode(), record.arm.encode()))
                    message["headers"] = [*message.get("headers", ()), *own]
                await send(message)

            try:
                await self._app(scope, receive, sending)
            except BaseException as error:
                record.status = "500" if isinstance(error, Exception) else _CLIENT_LEFT
                raise
            finally:
                # The path with placeholders for its parameters; one name for all the paths that are not served.
                record.endpoint = getattr(scope.get("endpoint"), "path", "other")
