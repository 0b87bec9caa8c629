"""The field ``format``: what the output must match."""

from __future__ import annotations

from server.http.body import Body
from server.http.json_codec import write_json
from specdec.types import GrammarKind, GrammarParams


def read_format(body: Body) -> GrammarParams | None:
    """``"json"``, or a JSON schema; an empty text is none."""
    value = body.value("format")
    body.names["grammar"] = body.path("format")
    if value is None or value == "":
        return None
    if value == "json":
        return GrammarParams(GrammarKind.JSON_OBJECT)
    if isinstance(value, dict):
        return GrammarParams(GrammarKind.JSON_SCHEMA, write_json(value).decode())
    body.refuse("format", 'must be "json" or a JSON schema')
    return None
