"""What bodies of /infill and /completion have in common."""

from __future__ import annotations

from server.http.body import Body
from server.http.llamacpp.ask import Ask
from specdec.types import Request


def read_ask(body: Body, request: Request, n_predict: int | None) -> Ask:
    """``request`` and how it is to be answered."""
    fields = body.texts("response_fields")
    return Ask(
        request,
        stream=body.flag("stream"),
        return_tokens=body.flag("return_tokens"),
        response_fields=fields if body.has("response_fields") else None,
        n_predict=-1 if n_predict is None else n_predict,
    )
