"""Puts the dialects together into one ASGI application."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from server.http.call import Call
from server.http.deepseek.endpoints import DEEPSEEK
from server.http.endpoint import Endpoint
from server.http.endpoint_app import EndpointApp
from server.http.exact_paths import ExactPaths
from server.http.experiment_endpoints import EXPERIMENTS
from server.http.face import Face
from server.http.fields.schema import RESPONSES
from server.http.http_errors import MethodNotAllowedError, PathNotFoundError
from server.http.json_codec import write_json
from server.http.llamacpp.endpoints import LLAMACPP
from server.http.metrics_endpoint import METRICS
from server.http.mistral.endpoints import MISTRAL
from server.http.ollama.endpoints import OLLAMA
from server.http.openai.endpoints import OPENAI
from server.http.openai.errors import OpenAIErrors
from server.http.openapi import openapi_document
from server.http.probes import PROBES
from server.http.refusal import refusal_of
from server.http.tabby.endpoints import TABBY
from server.page.endpoints import PAGE

_ERRORS = OpenAIErrors()
# Dialects that share a path with another come before it, and claim their own bodies.
DIALECTS: tuple[Endpoint, ...] = (
    *PROBES, *METRICS, *EXPERIMENTS, *TABBY, *OPENAI, *LLAMACPP, *MISTRAL, *DEEPSEEK, *OLLAMA,
)  # fmt: skip
ENDPOINTS = (*DIALECTS, *PAGE)


def build_app(face: Face, endpoints: Iterable[Endpoint] = ENDPOINTS) -> Starlette:
    """The application that serves ``endpoints``, and their description at /openapi.json."""
    served = [*endpoints]
    document = openapi_document(served)

    async def describe(call: Call) -> None:
        await call.reply(200, document)

    served.append(Endpoint("GET", "/openapi.json", describe, _ERRORS, {"responses": RESPONSES}))
    groups: dict[str, dict[str, list[Endpoint]]] = {}
    for endpoint in served:
        groups.setdefault(endpoint.path, {}).setdefault(endpoint.method, []).append(endpoint)
    routes = [
        Route(path, EndpointApp(sharing, face), methods=[method])
        for path, methods in groups.items()
        for method, sharing in methods.items()
    ]
    return ExactPaths(routes, exception_handlers={HTTPException: _refuse})


async def _refuse(request: Request, error: Any) -> Response:
    """What the router refuses: a path that is not there, or a method."""
    found: PathNotFoundError | MethodNotAllowedError = PathNotFoundError(request.url.path)
    if error.status_code == 405:
        found = MethodNotAllowedError(request.method, (error.headers or {}).get("Allow", "another method"))
    refusal = refusal_of(found, {})
    return Response(write_json(_ERRORS.body(refusal)), refusal.status, dict(error.headers or {}), "application/json")
