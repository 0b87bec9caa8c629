"""Fields for the tables of dialects: those of the engine's parameters, grammars, predictions, and plain ones.

A parameter's field follows from its kind, bounds and name in `specdec.core.types`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import orjson

from server.json_body import GRAMMAR_FIELD, GROUPS, Body, Field, Reader, Schema, Table, read_request, write_json
from server.json_schemas import closed, lenient
from specdec.core.fields import (
    INT31,
    UINT64,
    Flag,
    Int,
    LogitBias,
    Number,
    OneOf,
    Param,
    Repeated,
    Seed,
    Text,
    Texts,
    TokenIds,
    params_of,
)
from specdec.core.types import (
    GrammarKind,
    GrammarParams,
    ResumeParams,
    SpeculationParams,
)
from specdec.engine.validation import MAX_SCHEMA_BYTES

NO_PROMPT = (0,)
"""Replaces a prompt that is wrong or missing, so that all other fields are still checked."""


MAX_UNKNOWN, MAX_SHOWN = 8, 64  # unknown fields that are looked up, and the characters of each
Record = TypeVar("Record")

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
INTEGER: Schema = {"type": "integer"}
NOT_KEPT: Schema = {"type": "null", "description": "Nothing is kept on the server."}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}


def listed(items: Schema, **keywords: Any) -> Schema:
    """The schema of a list."""
    return {"type": "array", **keywords, "items": items}


def either(*schemas: Schema) -> Schema:
    """The schema of a value that matches exactly one of ``schemas``."""
    return {"oneOf": [*schemas]}


def with_fields(fields: Mapping[str, Schema], *required: str) -> Schema:
    """The schema of an object."""
    return {"type": "object", **({"required": [*required]} if required else {}), "properties": dict(fields)}


TEXTS = either(TEXT, listed(TEXT))
IDS = listed(COUNT)


def text_field(name: str, doc: str = "", **keywords: Any) -> Field:
    """A string that the endpoint uses."""
    return Field(name, _described({**TEXT, **keywords}, doc), Body.text)


def flag_field(name: str, doc: str = "", *, default: bool = False) -> Field:
    """A flag that the endpoint uses."""
    return Field(name, _described({**FLAG, "default": True} if default else FLAG, doc), Body.flag, default=default)


def integer_field(name: str, low: int, doc: str = "") -> Field:
    """A whole number from ``low`` on that the endpoint uses."""
    return Field(name, _described({**INTEGER, "minimum": low}, doc), partial(Body.integer, low=low, high=INT31))


def object_field(name: str, fields: Table, *required: str) -> Field:
    """An object, whose fields are read as if they were the body's. Its own value is the inner `Body`."""
    return Field(name, with_fields(schemas(fields), *required), fields=fields)


def _described(schema: Schema, doc: str) -> Schema:
    return {**schema, "description": doc} if doc else schema


def schemas(table: Iterable[Field]) -> dict[str, Schema]:
    """JSON schemas by field name."""
    return {each.name: each.schema for each in table}


def param_field(record: type, parameter: str, name: str = "", default: Any = None) -> Field:
    """A parameter of ``record`` as a field, with a dialect's ``name`` and ``default`` if it has its own."""
    (each,) = (each for each in params_of(record) if each.name == parameter)
    group = f"{GROUPS[record]}." if record in GROUPS else ""
    return Field(name or each.json_name or parameter, each.schema(default), _reader(each), group + parameter, default)


def param_fields(record: type, *left_out: str) -> Table:
    """The parameters of ``record`` that JSON bodies have, but for those ``left_out``."""
    return tuple(
        param_field(record, each.name)
        for each in params_of(record)
        if each.json_name is not None and each.name not in left_out
    )


def _reader(each: Param) -> Reader:
    match each.kind:
        case Number():
            return Body.number
        case Int() as kind:
            return partial(_read_int, kind=kind, default=each.default)
        case Seed():
            return read_seed
        case Flag():
            return Body.flag
        case Text():
            return Body.text
        case Texts() as kind:
            return partial(_read_repeated, kind=kind, read=_read_texts)
        case TokenIds() as kind:
            return partial(_read_repeated, kind=kind, read=partial(Body.integers, low=0, high=INT31))
        case OneOf() as kind:
            return partial(_read_choice, choices=kind.values, convert=type(each.default), prefix=f"{each.name}_")
        case LogitBias() as kind:
            return partial(_read_repeated, kind=kind, read=_read_bias)
    raise TypeError(f"no JSON field has the kind {each.kind}")


def _read_int(body: Body, name: str, kind: Int, default: int | None) -> int | None:
    """A count within its bounds, since endpoints use some counts before the whole request is checked."""
    value = body.whole(name, kind.low, kind.high)
    if value is None:
        return None
    if value == kind.off:
        return default
    if problem := kind.problem(value):
        body.refuse(name, problem)
        return None
    return value


def read_seed(body: Body, name: str) -> int | None:
    """A whole number of 64 bits, signed or unsigned. -1 requests a random seed, as in vLLM and llama.cpp."""
    low = -(UINT64 // 2) - 1
    seed = body.whole(name, low, UINT64)
    if seed is not None and not low <= seed <= UINT64:
        body.refuse(name, Seed().problem(seed))
    return None if seed is None or seed == -1 else seed % (UINT64 + 1)


RANDOM_SEED = Field(
    "random_seed", {**INTEGER, "description": "The seed, by Mistral's name."}, read_seed, "sampling.seed"
)


def _read_repeated(body: Body, name: str, kind: Repeated, read: Reader) -> Any:
    """A list or an object, which is refused for its length before it is copied."""
    given = body.raw(name)
    if isinstance(given, list | dict) and (problem := kind.excess(len(given))):
        body.refuse(name, problem)
        return None
    return read(body, name)


def _read_texts(body: Body, name: str) -> tuple[str, ...] | None:
    return body.texts(name) or None


def _read_choice(
    body: Body, name: str, choices: Sequence[str], convert: Callable[[str], Any], prefix: str
) -> str | None:
    """A choice, which may also be spelled as in the gRPC message (``MODE_OFF``)."""
    text = body.text(name)
    if text is None:
        return None
    chosen = text.lower().removeprefix(prefix)
    if chosen == "unspecified":
        return None
    if chosen not in choices:
        body.refuse(name, f"must be one of {', '.join(choices)}")
        return None
    return convert(chosen)


def _read_bias(body: Body, name: str) -> tuple[tuple[int, float], ...] | None:
    given = body.object(name)
    if given is None:
        return None
    biases: dict[int, float] = {}
    for token in given.field_names:
        bias = given.number(token)
        if not is_token_id(token):
            body.refuse(name, f"{token[:20]!r} is no token id; keys are token ids in decimal")
        elif bias is not None:
            biases[int(token)] = bias
    return tuple(sorted(biases.items()))


def is_token_id(name: str) -> bool:
    """Whether an object's key is a token id in decimal."""
    return name.isascii() and name.isdigit() and len(name) < 10


def read_record(body: Body, name: str, record: type[Record], table: Table) -> Record | None:
    """An object with the parameters of ``record``. Only specdec has such objects, so an unknown field is a mistake."""
    given = body.object(name)
    if given is None:
        return None
    known = [each.name for each in table]
    unknown = [inner[:MAX_SHOWN] for inner in given.field_names if inner not in known]
    for inner in unknown[:MAX_UNKNOWN]:
        given.refuse(inner, f"is not known; {name} has {', '.join(known)}")
    return record(**read_request(given, table).engine)


def record_field(name: str, record: type, doc: str) -> Field:
    """A field of `Request` that is a record of its own."""
    table = param_fields(record)
    schema = _described(with_fields(schemas(table)), doc)
    return Field(name, schema, partial(read_record, record=record, table=table), name)


SPECULATION = record_field("speculation", SpeculationParams, "Changes how fast tokens come, never which.")
RESUME = record_field(
    "resume", ResumeParams, "Continues a broken stream: the same body with the tokens received and their seed."
)

_TYPES = ("text", "json_object", "json_schema")
_FORMS: dict[GrammarKind, tuple[Any, str]] = {
    GrammarKind.JSON_SCHEMA: (str | dict, "must be a JSON schema, as an object or as its text"),
    GrammarKind.CHOICE: (list, "must be a list of strings"),
}
_STRUCTURED: dict[str, tuple[GrammarKind, Schema]] = {
    "json": (GrammarKind.JSON_SCHEMA, either(TEXT, OBJECT)),
    "regex": (GrammarKind.REGEX, TEXT),
    "choice": (GrammarKind.CHOICE, listed(TEXT)),
    "grammar": (GrammarKind.EBNF, {**TEXT, "description": "Lark with `start:`, or GBNF with `root ::=`."}),
}


def _read_format(body: Body, name: str, holder: str = "") -> GrammarParams | None:
    """An object with a ``type`` and, for a JSON schema, the ``schema``, which may be in an object ``holder``."""
    given = body.object(name)
    if given is None:
        return None
    kind = given.text("type")
    if kind not in _TYPES:
        given.refuse("type", f"must be one of {', '.join(_TYPES)}")
    if kind == "json_object":
        beside = "schema" if given.has("schema") else "value"  # llama.cpp's name; TGI's, which huggingface_hub sends
        known = read_grammar(given, beside, GrammarKind.JSON_SCHEMA)
        return GrammarParams(GrammarKind.JSON_OBJECT) if known is None else known
    if kind != "json_schema":
        return None
    schema = given.object(holder) if holder else given
    if schema is None or not schema.has("schema"):
        given.refuse(holder or "schema", 'must hold a JSON schema in "schema"' if holder else "must be a JSON schema")
        return None
    return read_grammar(schema, "schema", GrammarKind.JSON_SCHEMA)


def _read_structured(body: Body, name: str) -> GrammarParams | None:
    given = body.object(name)
    if given is None:
        return None
    found = [
        grammar for inner, (kind, _) in _STRUCTURED.items() if (grammar := read_grammar(given, inner, kind)) is not None
    ]
    if given.flag("json_object"):
        found.append(GrammarParams(GrammarKind.JSON_OBJECT))
    if len(found) != 1:
        body.refuse(name, f"give exactly one of {', '.join((*_STRUCTURED, 'json_object'))}")
    return found[0] if found else None


def read_grammar(body: Body, name: str, kind: GrammarKind) -> GrammarParams | None:
    """A grammar of ``kind``; JSON values are written as text. Objects of a schema have no other properties than it
    lists, as where OpenAI (``strict``), Ollama, llama.cpp and vLLM convert it."""
    value = body.value(name)
    if value is None:
        return None
    wanted, rule = _FORMS.get(kind, (str, "must be a string"))
    if not isinstance(value, wanted):
        body.refuse(name, rule)
        return None
    if kind is GrammarKind.JSON_SCHEMA and isinstance(value, str):
        value = _parsed_schema(body, name, value)
    if kind is GrammarKind.JSON_SCHEMA and isinstance(value, dict) and len(write_json(value)) <= MAX_SCHEMA_BYTES:
        value, warning = lenient(closed(value))
        if warning:
            body.warn(name, warning)
    return GrammarParams(kind, value if isinstance(value, str) else write_json(value).decode())


def _parsed_schema(body: Body, name: str, text: str) -> Any:
    """The JSON schema that ``text`` holds; a text that is too long or no JSON as it is, for the engine to refuse."""
    try:
        schema = orjson.loads(text) if len(text) <= MAX_SCHEMA_BYTES else text
    except orjson.JSONDecodeError:
        return text
    known = Body({name: schema}, body.violations, body.names, body.path("")).value(name)
    return known if isinstance(known, dict) else text


_FORMAT_TYPE: Mapping[str, Schema] = {"type": {"enum": [*_TYPES]}}
FORMAT = Field("format", with_fields({**_FORMAT_TYPE, "schema": OBJECT}), _read_format, GRAMMAR_FIELD)
GRAMMAR: Table = (
    Field(
        "response_format",
        with_fields(
            {
                **_FORMAT_TYPE,
                "json_schema": with_fields({"schema": OBJECT}),
                "schema": {**OBJECT, "description": "Of json_object: llama.cpp's name."},
                "value": {**OBJECT, "description": "Of json_object: TGI's name, which huggingface_hub sends."},
            }
        ),
        partial(_read_format, holder="json_schema"),
        GRAMMAR_FIELD,
    ),
    *(
        Field(f"guided_{name}", schema, partial(read_grammar, kind=kind), GRAMMAR_FIELD)
        for name, (kind, schema) in _STRUCTURED.items()
    ),
    Field("regex", {**TEXT, "description": "SGLang."}, partial(read_grammar, kind=GrammarKind.REGEX), GRAMMAR_FIELD),
    Field("ebnf", {**TEXT, "description": "SGLang."}, partial(read_grammar, kind=GrammarKind.EBNF), GRAMMAR_FIELD),
    Field(
        "structured_outputs",
        with_fields({name: schema for name, (_, schema) in _STRUCTURED.items()} | {"json_object": FLAG}),
        _read_structured,
        GRAMMAR_FIELD,
    ),
)


def _read_prediction(body: Body, name: str) -> str | None:
    given = body.object(name)
    if given is None:
        return None
    if given.text("type") not in (None, "content"):
        given.refuse("type", 'must be "content"')
    value = given.raw("content")
    if isinstance(value, str):
        return value
    texts = [part.text("text") for part in given.objects("content")] if isinstance(value, list) else [None]
    if None in texts:
        given.refuse("content", 'must be a string or a list of {"type": "text", "text": "..."}')
    return "".join(text for text in texts if text is not None)


PREDICTION = Field(
    "prediction",
    {
        **with_fields({"type": {"enum": ["content"]}, "content": either(TEXT, listed(with_fields({"text": TEXT})))}),
        "description": "What the output is expected to resemble; it changes how fast tokens come, never which.",
    },
    _read_prediction,
)
