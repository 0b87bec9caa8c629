"""What the output must match."""

from __future__ import annotations

from typing import Any

from server.http.body import Body
from server.http.json_codec import write_json
from specdec.types import GrammarKind, GrammarParams

_GUIDED = {
    "guided_json": GrammarKind.JSON_SCHEMA,
    "guided_regex": GrammarKind.REGEX,
    "guided_choice": GrammarKind.CHOICE,
    "guided_grammar": GrammarKind.EBNF,
}
_STRUCTURED = {
    "json": GrammarKind.JSON_SCHEMA,
    "regex": GrammarKind.REGEX,
    "choice": GrammarKind.CHOICE,
    "grammar": GrammarKind.EBNF,
}
_FORMS: dict[GrammarKind, tuple[Any, str]] = {
    GrammarKind.JSON_SCHEMA: (str | dict, "must be a JSON schema, as an object or as its text"),
    GrammarKind.CHOICE: (list, "must be a list of strings"),
}
_TYPES = ("text", "json_object", "json_schema")


def read_grammar(body: Body) -> GrammarParams | None:
    """OpenAI's ``response_format``, or vLLM's ``guided_*`` fields or ``structured_outputs``; at most one of them."""
    found = [
        (name, grammar)
        for name, grammar in [
            ("response_format", _response_format(body)),
            *((name, _grammar(body, name, kind)) for name, kind in _GUIDED.items()),
            ("structured_outputs", _structured(body)),
        ]
        if grammar is not None
    ]
    if not found:
        return None
    for name, _ in found[1:]:
        body.refuse(name, f"{found[0][0]} is given too; give one of them")
    body.names["grammar"] = body.path(found[0][0])
    return found[0][1]


def _response_format(body: Body) -> GrammarParams | None:
    given = body.object("response_format")
    if given is None:
        return None
    kind = given.text("type")
    if kind not in _TYPES:
        given.refuse("type", f"must be one of {', '.join(_TYPES)}")
    if kind == "json_object":
        return GrammarParams(GrammarKind.JSON_OBJECT)
    if kind != "json_schema":
        return None
    schema = given.object("json_schema")
    if schema is None or not schema.has("schema"):
        given.refuse("json_schema", 'must hold a JSON schema in "schema"')
        return None
    return _grammar(schema, "schema", GrammarKind.JSON_SCHEMA)


def _structured(body: Body) -> GrammarParams | None:
    given = body.object("structured_outputs")
    if given is None:
        return None
    found = [grammar for name, kind in _STRUCTURED.items() if (grammar := _grammar(given, name, kind)) is not None]
    if given.flag("json_object"):
        found.append(GrammarParams(GrammarKind.JSON_OBJECT))
    if len(found) != 1:
        body.refuse("structured_outputs", f"give exactly one of {', '.join((*_STRUCTURED, 'json_object'))}")
    return found[0] if found else None


def _grammar(body: Body, name: str, kind: GrammarKind) -> GrammarParams | None:
    value = body.value(name)
    if value is None:
        return None
    wanted, rule = _FORMS.get(kind, (str, "must be a string"))
    if not isinstance(value, wanted):
        body.refuse(name, rule)
        return None
    return GrammarParams(kind, value if isinstance(value, str) else write_json(value).decode())
