"""A request's options in JSON bodies, read by the names of a dialect."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypeVar

from server.interfaces import TokenizerLike
from server.json_body import Body, write_json
from specdec.core.fields import (
    INT31,
    OPENAI,
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
    OutputParams,
    Request,
    ResumeParams,
    SamplingParams,
    SpeculationParams,
    StoppingParams,
    TextRules,
)

MAX_UNKNOWN, MAX_SHOWN = 8, 64  # unknown fields that a refusal names, and the characters of each
Record = TypeVar("Record")
# What the engine calls the group of a record's fields.
_GROUPS: dict[type[Any], str] = {
    SamplingParams: "sampling.",
    StoppingParams: "stopping.",
    TextRules: "stopping.",
    OutputParams: "output.",
    SpeculationParams: "speculation.",
    ResumeParams: "resume.",
    Request: "",
}


def read_params(body: Body, record: type[Record], dialect: str = OPENAI, **given: Any) -> Record:
    """The parameters of ``record`` that ``body`` has, by the names of ``dialect``; those ``given`` are not looked for,
    and the others are as by default. ``body`` learns what the engine calls them."""
    return record(**read_values(body, record, dialect, given))


def read_values(body: Body, record: Any, dialect: str = OPENAI, given: Mapping[str, Any] = {}) -> dict[str, Any]:
    """The same by the parameters' names: what is there, and what is ``given``."""
    found = dict(given)
    for each, name, label, read in _named(record, dialect):
        is_given = each.name in given
        if not is_given and not body.has(name):
            continue
        body.names.setdefault(label, body.path(name))
        value = None if is_given else read(body, name, each)
        if value is not None:
            found[each.name] = value
    return found


@cache
def _named(record: Any, dialect: str) -> list[tuple[Param, str, str, Callable[[Body, str, Param], Any]]]:
    """The parameters that bodies of a dialect have: each with its name there, the engine's, and its reader."""
    return [
        (each, name, _GROUPS[record] + each.label, _READERS[type(each.kind)])
        for each in params_of(record)
        if (name := each.json_name(dialect)) is not None
    ]


def param_schemas(record: type[Any], dialect: str = OPENAI, **defaults: Any) -> dict[str, Mapping[str, Any]]:
    """The JSON schemas of what `read_params` looks for, by name. ``defaults``: the dialect's own, by parameter."""
    named = ((each.json_name(dialect), each) for each in params_of(record))
    return {name: each.schema(defaults.get(each.name)) for name, each in named if name is not None}


def _read_number(body: Body, name: str, each: Param) -> float | None:
    return body.number(name)


def _read_whole(body: Body, name: str, each: Param) -> int | None:
    assert isinstance(each.kind, Int)
    kind, value = each.kind, body.whole(name, each.kind.low, each.kind.high)
    if value is None:
        return None
    if value == kind.off:
        return kind.low
    problem = kind.problem(value)
    if problem:
        body.refuse(name, problem)
    return None if problem else value


def read_seed(body: Body, name: str = "seed", each: Param | None = None) -> int | None:
    """Any whole number of 64 bits, signed or not; -1 asks for a random one, as vLLM and llama.cpp have it."""
    low = -(UINT64 // 2) - 1
    seed = body.whole(name, low, UINT64)
    if seed is not None and not low <= seed <= UINT64:
        body.refuse(name, Seed().problem(seed))
    return None if seed is None or seed == -1 else seed % (UINT64 + 1)


def read_count(body: Body, record: Any, parameter: str, name: str = "") -> int | None:
    """One parameter of ``record`` that is a whole number, by another ``name`` or ahead of the others."""
    return _read_whole(body, name or parameter, _param(record, parameter))


def _param(record: Any, name: str) -> Param:
    (each,) = (each for each in params_of(record) if each.name == name)
    return each


def _read_flag(body: Body, name: str, each: Param) -> bool:
    return body.flag(name)


def _read_text(body: Body, name: str, each: Param) -> str | None:
    return body.text(name)


def _read_texts(body: Body, name: str, each: Param) -> tuple[str, ...] | None:
    assert isinstance(each.kind, Texts)
    return None if _is_too_long(body, name, each.kind) else body.texts(name) or None


def _read_ids(body: Body, name: str, each: Param) -> tuple[int, ...]:
    assert isinstance(each.kind, TokenIds)
    return () if _is_too_long(body, name, each.kind) else body.integers(name, 0, INT31)


def _is_too_long(body: Body, name: str, kind: Repeated) -> bool:
    """Whether the list or the object ``name`` is refused for its length, before it is copied."""
    given = body.raw(name)
    problem = kind.excess(len(given)) if isinstance(given, list | dict) else ""
    if problem:
        body.refuse(name, problem)
    return bool(problem)


def _read_choice(body: Body, name: str, each: Param) -> str | None:
    """Also as the message spells it (MODE_OFF)."""
    assert isinstance(each.kind, OneOf)
    text = body.text(name)
    if text is None:
        return None
    chosen = text.lower().removeprefix(f"{each.name}_")
    if chosen == "unspecified":
        return None
    if chosen not in each.kind.values:
        body.refuse(name, f"must be one of {', '.join(each.kind.values)}")
        return None
    return type(each.default)(chosen)


def _read_bias(body: Body, name: str, each: Param) -> tuple[tuple[int, float], ...] | None:
    assert isinstance(each.kind, LogitBias)
    given = None if _is_too_long(body, name, each.kind) else body.object(name)
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


_READERS: dict[type[Any], Callable[[Body, str, Param], Any]] = {
    Number: _read_number, Int: _read_whole, Seed: read_seed, Flag: _read_flag, Text: _read_text, Texts: _read_texts,
    TokenIds: _read_ids, OneOf: _read_choice, LogitBias: _read_bias,
}  # fmt: skip


def read_speculation(body: Body) -> SpeculationParams:
    """The object ``speculation``; absent: the controller decides."""
    return _read_own(body, "speculation", SpeculationParams) or SpeculationParams()


def read_resume(body: Body) -> ResumeParams | None:
    """The object ``resume``: where a stream broke off that goes on."""
    return _read_own(body, "resume", ResumeParams)


def _read_own(body: Body, group: str, record: type[Record]) -> Record | None:
    """The object ``group``, which is ours alone, so that an unknown field is a mistake, and named."""
    given = body.object(group)
    if given is None:
        return None
    known = [name for each in params_of(record) if (name := each.json_name()) is not None]
    unknown = [name[:MAX_SHOWN] for name in given.field_names if name not in known]
    for name in unknown[:MAX_UNKNOWN]:
        given.refuse(name, f"is not known; {group} has {', '.join(known)}")
    return read_params(given, record)


def read_stopping(
    body: Body, tokenizer: TokenizerLike, max_tokens: int | None, dialect: str = OPENAI, name: str = "stop"
) -> StoppingParams:
    """``stop``, by its ``name`` there, and vLLM's fields around it; ``max_tokens`` has been read already.

    A stop string that is the name of a special token also stops at that token, which text may leave out.
    """
    stops = tuple(dict.fromkeys(_read_texts(body, name, _param(StoppingParams, "stop")) or ()))
    body.names["stopping.stop"] = body.path(name)
    ids = _read_ids(body, "stop_token_ids", _param(StoppingParams, "stop_token_ids"))
    named = [found for stop in stops if (found := tokenizer.special_id(stop)) is not None]
    return read_params(
        body, StoppingParams, dialect, max_tokens=max_tokens, stop=stops,
        stop_token_ids=tuple(dict.fromkeys((*ids, *named))),
    )  # fmt: skip


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
    return None if given is None else read_format(given, "json_schema")


def read_format(given: Body, holder: str = "") -> GrammarParams | None:
    """``type`` is text, json_object or json_schema; the schema is in the field ``schema`` of the object ``holder``, or
    beside the type."""
    kind = given.text("type")
    if kind not in _TYPES:
        given.refuse("type", f"must be one of {', '.join(_TYPES)}")
    if kind == "json_object":
        return GrammarParams(GrammarKind.JSON_OBJECT)
    if kind != "json_schema":
        return None
    schema = given.object(holder) if holder else given
    if schema is None or not schema.has("schema"):
        given.refuse(holder or "schema", 'must hold a JSON schema in "schema"' if holder else "must be a JSON schema")
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
