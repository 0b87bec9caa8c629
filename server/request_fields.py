"""JSON fields of a generation request, as the engine's parameters: speculation, sampling, stopping, grammar."""

from __future__ import annotations

from typing import Any

from server.interfaces import TokenizerLike
from server.json_body import Body, write_json
from specdec.engine.validation import MAX_STOPS
from specdec.types import GrammarKind, GrammarParams, SamplingParams, SpeculationMode, SpeculationParams, StoppingParams

_LIMIT = (1 << 31) - 1


def read_speculation(body: Body) -> SpeculationParams:
    """The object ``speculation``, with the fields of the proto's SpeculationOptions; absent: the controller decides."""
    given = body.object("speculation")
    if given is None:
        return SpeculationParams()
    return SpeculationParams(
        mode=_mode(given),
        drafters=given.texts("drafters") or None,
        max_nodes=given.integer("max_nodes", 0, _LIMIT),
        max_depth=given.integer("max_depth", 0, _LIMIT),
        width=given.integer("width", 0, _LIMIT),
    )


def _mode(given: Body) -> SpeculationMode:
    """Also as the proto spells it (MODE_OFF)."""
    text = given.text("mode")
    if text is None:
        return SpeculationMode.AUTO
    name = text.lower().removeprefix("mode_")
    try:
        return SpeculationMode.AUTO if name == "unspecified" else SpeculationMode(name)
    except ValueError:
        given.refuse("mode", f"must be one of {', '.join(SpeculationMode)}")
        return SpeculationMode.AUTO


_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INT31 = (1 << 31) - 1
_INT63, _UINT64 = 1 << 63, 1 << 64


def read_sampling(body: Body, n: int) -> SamplingParams:
    """The fields named as OpenAI and vLLM name them; those left out are off. ``n`` samples."""
    numbers: dict[str, Any] = {name: value for name in _NUMBERS if (value := body.number(name)) is not None}
    return SamplingParams(
        **numbers,
        top_k=max(0, body.integer("top_k", -1, _INT31) or 0),
        logit_bias=_logit_bias(body),
        allowed_token_ids=body.integers("allowed_token_ids", 0, _INT31),
        seed=read_seed(body),
        n=n,
    )


def read_seed(body: Body) -> int | None:
    """Any whole number of 64 bits, signed or not; -1 asks for a random one, as vLLM and llama.cpp have it."""
    seed = body.integer("seed", -_INT63, _UINT64 - 1)
    return None if seed is None or seed == -1 else seed % _UINT64


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    given = body.object("logit_bias")
    if given is None:
        return ()
    biases: dict[int, float] = {}
    for name in given.field_names:
        bias = given.number(name)
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            body.refuse("logit_bias", f"{name[:20]!r} is no token id; keys are token ids in decimal")
        elif bias is not None:
            biases[int(name)] = bias
    return tuple(sorted(biases.items()))


MAX_TOKENS = (1 << 31) - 1


def read_stopping(body: Body, tokenizer: TokenizerLike, max_tokens: int | None) -> StoppingParams:
    """``stop`` and vLLM's fields around it; ``max_tokens`` has been read already.

    A stop string that is the name of a special token also stops at that token, which text may leave out.
    """
    stops = tuple(dict.fromkeys(body.texts("stop")))
    if len(stops) > MAX_STOPS:
        body.refuse(
            "stop",
            f"at most {MAX_STOPS} different strings, got {len(stops)}; leave some out, or give ids in stop_token_ids",
        )
        stops = ()
    named = [found for stop in stops if (found := tokenizer.special_id(stop)) is not None]
    return StoppingParams(
        max_tokens=max_tokens,
        min_tokens=body.integer("min_tokens", 0, MAX_TOKENS) or 0,
        stop=stops,
        stop_token_ids=tuple(dict.fromkeys((*body.integers("stop_token_ids", 0, MAX_TOKENS), *named))),
        include_stop=body.flag("include_stop_str_in_output"),
        ignore_eos=body.flag("ignore_eos"),
    )


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
