"""Which web pages may call the HTTP port: none of another origin, unless the configuration names it."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_METHODS = ("GET", "HEAD", "POST")
_SHOWN = ("x-request-id", "retry-after", "www-authenticate")  # beside the body and what scripts may always read
_PREFLIGHT_S = 600


def with_cors(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """``app``, which browsers let scripts of ``origins`` call (``*``: of any); as it is where there are none.

    Preflights are answered here: they carry no key. Cookies mean nothing to this server, so none are asked for; a key
    goes into a header, which scripts may send.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app, allow_origins=origins, allow_methods=_METHODS, allow_headers=["*"], expose_headers=_SHOWN,
        max_age=_PREFLIGHT_S,
    )  # fmt: skip
