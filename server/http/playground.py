"""The endpoints of the playground: GET /, its files, and what it reads about the engine."""

from __future__ import annotations

from importlib.resources import files

from server.auth.principal import current_caller
from server.http.call import Call, Endpoint
from server.http.errors import path_not_found
from server.http.ollama import alive
from server.http.operator_endpoints import PROBE_ERRORS
from server.request_fields import TEXT
from server.served_model import Task

MAIN = "index.html"
_TYPES = {
    MAIN: b"text/html; charset=utf-8",
    "page.js": b"text/javascript; charset=utf-8",
    "page.css": b"text/css; charset=utf-8",
    "icon.svg": b"image/svg+xml",
}


_FILES = {name: (files("server.playground") / "static" / name).read_bytes() for name in _TYPES}
_HEADERS = (
    (b"cache-control", b"no-cache"),  # a browser shows the page of the server that runs
    (b"content-security-policy", b"default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
)


_HTML = "text/html", "application/xhtml+xml"  # `*/*`, as plain clients send it, does not count


async def root(call: Call) -> None:
    """The playground for browsers, which accept HTML; the line that Ollama's clients expect for all other callers."""
    accept = call.header("accept").lower()
    if any(name in accept for name in _HTML):
        await _send(call, MAIN, (b"vary", b"accept"))
    else:
        await alive(call)


async def docs(call: Call) -> None:
    """The playground's file, whose script shows /openapi.json at this path."""
    await _send(call, MAIN)


async def page_file(call: Call) -> None:
    """A file of the playground."""
    name = call.path_params["name"]
    if name not in _FILES:
        raise path_not_found(f"/page/{name}")
    await _send(call, name)


async def info(call: Call) -> None:
    """The engine's properties, the names of the models that the playground may ask, and for operators those of
    the experiments that run."""
    found, experiments = call.model.info, call.model.experiments
    statuses = await experiments.statuses() if current_caller().admin else []
    await call.reply(
        200,
        {
            "version": found.version,
            "model": call.model.name,
            "models": [model.name for model in call.server.models if model.can(Task.ANY)],
            "dtype": found.dtype,
            "numeric_mode": found.numeric_mode,
            "max_context": found.max_context,
            "drafters": found.drafters,
            "fills_in": call.model.fills_in,
            "experiments": [status.name for status in statuses if status.state == "running"],
        },
    )


async def _send(call: Call, name: str, *more: tuple[bytes, bytes]) -> None:
    """A file with headers ``more``."""
    await call.reply_data(200, _FILES[name], _TYPES[name], (*_HEADERS, *more))


_NAME = {"name": "name", "in": "path", "required": True, "schema": TEXT}
PLAYGROUND = (
    Endpoint("GET", "/", root, PROBE_ERRORS, "The playground, or that a server is there"),
    Endpoint("GET", "/docs", docs, PROBE_ERRORS, "A viewer of /openapi.json"),
    Endpoint("GET", "/page/info", info, PROBE_ERRORS, "What the engine is"),
    Endpoint("GET", "/page/{name}", page_file, PROBE_ERRORS, "A file of the playground", parameters=(_NAME,)),
)
