"""The parameters of calls in the form `ToolForm.QWEN_XML`: their text as JSON, and a grammar of it.

A value's text ends at the first `CLOSING` before another parameter or one of `ENDS`, so no value can hold these in a
row.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import orjson

from server.json_body import too_deep
from server.json_schemas import JSON_TYPES, branches, choices, json_types, looked_at, target
from specdec.engine.validation import MAX_SCHEMA_BYTES

OPENING, CLOSING, END = "<parameter=", "</parameter>", "</function>"
ENDS = (END, "</tool_call>")  # of a call; the second one if a model forgot the first
MAX_NAME = 256  # characters, of a tool and of a parameter
_KEY = rf"[^>\n]{{1,{MAX_NAME}}}"  # other names of parameters cannot be written in this form


def _owners(schema: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The objects that list a call's parameters; several: one of them applies. ``schema``: of the tool's arguments."""
    return branches(_untyped(schema), schema)


def _untyped(schema: Mapping[str, Any]) -> dict[str, Any]:
    """``schema`` without ``type``, which many callers give beside a reference or a list of alternatives."""
    return {key: value for key, value in schema.items() if key != "type"}


class ParameterTypes:
    """The JSON types that a tool's parameters may have. ``schema``: of its arguments."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema, self._owners = schema, _owners(schema)
        self._known: dict[str, frozenset[str]] = {}  # looked up when a call has them: there may be thousands

    def of(self, key: str) -> frozenset[str]:
        """Those of the parameter ``key``."""
        if key not in self._known:
            values = [listed[key] for listed in map(_properties, self._owners) if key in listed]
            values = values or [owner.get("additionalProperties") for owner in self._owners]
            types = (json_types(each) for value in values for each in branches(value, self._schema))
            self._known[key] = frozenset[str]().union(*types)
        return self._known[key]


_REFERENCE = re.compile(r'"\$ref": ("#[^"]*")')
_NUMBER = "-0123456789"
_STARTS = {"array": "[", "object": "{", "integer": _NUMBER, "number": _NUMBER, "boolean": "tTfF", "null": "nN"}
_WORDS = {"true": "true", "false": "false", "null": "null", "none": "null"}  # some templates write Python's
_LONGEST_WORD = max(map(len, _WORDS))


class ParameterText:
    """Turns the text of a value, which comes in pieces, into JSON: a string as it comes, other values at their end."""

    def __init__(self, types: Collection[str]) -> None:
        """types: JSON types that the value may have."""
        self._types = types
        self._held: list[str] = []
        self._is_string = None if "string" in types else False  # None: not decided

    def push(self, text: str) -> str:
        """Take the next piece, which is not empty; return the next piece of JSON."""
        if self._is_string:
            return _escaped(text)
        self._held.append(text)
        if self._is_string is None:
            start = "".join(self._held)
            likely = [kind for kind in self._types if start[0] in _STARTS.get(kind, "")]
            if not {"boolean", "null"}.issuperset(likely):
                self._is_string = False  # only its end shows whether it is one
            elif not likely or len(start) > _LONGEST_WORD:
                self._is_string = True
                return f'"{_escaped(start)}'
        return ""

    def end(self) -> str:
        """End the text; return the rest of the JSON."""
        return '"' if self._is_string else _as_json("".join(self._held), self._types)


def _escaped(text: str) -> str:
    return orjson.dumps(text).decode()[1:-1]


def _as_json(text: str, types: Collection[str]) -> str:
    """The value of one of ``types`` that ``text`` means. What means none is a string."""
    plain = text.strip()
    plain = _WORDS.get(plain.lower(), plain)
    try:
        value = orjson.loads(plain)
    except orjson.JSONDecodeError:
        return orjson.dumps(text).decode()
    # The library reads large integers as floats.
    kind = "integer" if plain.lstrip("-").isdigit() else JSON_TYPES[type(value)]
    if kind == "number" and not {"number", "string"}.intersection(types) and value.is_integer():
        return str(int(value))
    is_meant = "string" not in types or (kind != "string" and kind in types)
    return plain if is_meant and not too_deep(value) else orjson.dumps(text).decode()


# The spacing of Python's json, with which templates write calls, so that all of it is forced. What no grammar
# expresses is left out.
SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": ", "lenient": True}

_SPACE = r"[\s\x1c-\x1f]*"  # what Python's str.strip drops
_END_OF_VALUE = rf"(?s:.*)<\/parameter>{_SPACE}(<parameter=|<\/function>|<\/tool_call>)(?s:.*)"
_RULES = (
    # A string with the newlines around it and its closing tag, which ends it at a line's beginning whatever follows: a
    # model that writes a wrong tag after it would else write a string without end.
    rf"text[lazy]: /\n((?s:.*)\n)?<\/parameter>\n/ & ~/{_END_OF_VALUE}/",
    r'open: "\n"',
    rf'close: "\n{CLOSING}\n"',
    f'next: "{OPENING}"',
    f'end: "{END}"',
)


class ParameterGrammar:
    """Rules in llguidance's Lark of the parameters of calls.

    Parameters come in the schema's order. A string is any text, unless it is enumerated; so is what may be a string or
    something else.
    """

    def __init__(self) -> None:
        self.rules: list[str] = [*_RULES]
        self._length = 0  # of the schemas; with more than the engine allows, the rest is spared
        self._schemas: dict[str, str] = {}  # names of rules; tools have many parameters of the same schema
        self._known: dict[int | str, str] = {}  # likewise of one call, by identity and by text, before it is completed

    def add(self, name: str, schema: Mapping[str, Any], comment: str) -> None:
        """Add the rule ``name`` of all parameters of a call, with `END`. comment: a line above each schema, which the
        compiler's error about it shows."""
        self._known.clear()
        (owner, *others) = _owners(schema)
        owner = {} if others else owner
        known, needed = dict(_properties(owner)), owner.get("required")
        required = {key for key in needed if isinstance(key, str)} if isinstance(needed, list) else set[str]()
        known |= {key: {} for key in sorted(required - known.keys())}
        names = [key for key in known if re.fullmatch(_KEY, key)]
        last_required = max((at for at, key in enumerate(names) if key in required), default=-1)
        entries = [(json.dumps(f"{key}>"), known[key]) for key in names]
        if (further := owner.get("additionalProperties")) is not False:
            tag = f"{name.upper()}_OTHER"
            self.rules.append(f"{tag}: /{_KEY}>/" + "".join(f" & ~{each}" for each, _ in entries))
            entries.append((tag, further))

        def following(at: int) -> str:
            """The entry ``at`` or a later one, or the end."""
            return " | ".join([f"next {name}_{at}"] * (at < len(entries)) + ["end"] * (at > last_required))

        self.rules.append(f"{name}: {following(0)}")
        for at, (tag, value) in enumerate(entries):
            values = self._values(f"{name}_{at}", value, schema, comment)
            after = following(min(at + 1, len(names)))  # the last entry may come again, if it stands for further ones
            is_skipped = at + 1 < len(entries) and names[at] not in required
            skipped = f" | {name}_{at + 1}" if is_skipped else ""
            self.rules.append(f"{name}_{at}: {tag} {values} ({after}){skipped}")

    def _values(self, name: str, schema: Any, root: Mapping[str, Any], comment: str) -> str:
        """A parameter's values up to the closing tag."""
        texts, options = list[str](), list[str]()
        for branch in branches(schema, root):
            if (values := choices(branch)) is not None:
                texts += [each if isinstance(each, str) else json.dumps(each, ensure_ascii=False) for each in values]
            elif "string" in json_types(branch) or self._length > MAX_SCHEMA_BYTES:
                return "text"
            else:
                options.append(self._rule(branch, root, comment))
        if texts:  # one terminal: as alternatives of a rule, many would exceed the parser's items
            options.append(name.upper())
            self.rules.append(f"{options[-1]}: {' | '.join(map(json.dumps, dict.fromkeys(texts)))}")
        return f"open ({' | '.join(options)}) close" if options else "text"

    def _rule(self, schema: dict[str, Any], root: Mapping[str, Any], comment: str) -> str:
        """The name of the rule of ``schema``, a part of ``root``."""
        known = self._known
        if id(schema) not in known:  # many parameters refer to one definition
            own = json.dumps(schema)
            if own not in known:
                text = _complete(schema, root)
                if text not in self._schemas:
                    self._schemas[text] = f"json_{len(self._schemas)}"
                    self.rules += [comment, f"{self._schemas[text]}: %json {text}"]
                    self._length += len(text)
                known[own] = self._schemas[text]
            known[id(schema)] = known[own]
        return known[id(schema)]


MOST_VALUES = 1 << 14  # of all parameters, as `count_values` counts: what they share counts for each of them


def count_values(schema: Mapping[str, Any]) -> Iterator[int]:
    """How many values, alternatives and references a call's parameters have, part by part."""
    return (len(choices(each) or "1") for value in _listed(schema) for each, _ in looked_at(value, schema))


def _listed(schema: Mapping[str, Any]) -> Iterator[Any]:
    """The schemas of all listed parameters."""
    for owner in _owners(schema):
        yield from _properties(owner).values()


def _properties(owner: Mapping[str, Any]) -> dict[str, Any]:
    listed = owner.get("properties")
    return listed if isinstance(listed, dict) else {}


_OF_OBJECTS = ("anyOf", "oneOf", "allOf", "patternProperties", "minProperties", "maxProperties")
_OF_TEXTS = ("pattern", "format", "minLength", "maxLength")


def unenforced(schema: Mapping[str, Any]) -> str:
    """A warning of the keywords of the arguments and of their strings that `ParameterGrammar` leaves out, or empty."""
    looked = [*looked_at(_untyped(schema), schema)]
    several = sum(is_branch for _, is_branch in looked) > 1  # else a list's only alternative is enforced
    owners = [each for each, is_branch in looked if is_branch or several]
    found = (each for value in _listed(schema) for each in branches(value, schema))
    texts = [each for each in found if "string" in json_types(each) and choices(each) is None]
    names = [key for key in _OF_OBJECTS if any(key in each for each in owners)]
    names += [key for key in _OF_TEXTS if any(key in each for each in texts)]
    return f"{', '.join(names)}: not enforced in this model's calls" if names else ""


def _complete(schema: Mapping[str, Any], root: Mapping[str, Any]) -> str:
    """``schema``, a part of ``root``, with what its references reach."""
    numbers: dict[str, int] = {}

    def numbered(part: Any) -> str:
        return _REFERENCE.sub(
            lambda found: f'"$ref": "#/$defs/{numbers.setdefault(found[1], len(numbers))}"', json.dumps(part)
        )

    text, definitions = numbered({**schema, "x-guidance": SPACING}), list[str]()
    while len(definitions) < len(numbers):
        pointer = json.loads([*numbers][len(definitions)])
        definitions.append(f'"{len(definitions)}": {numbered(target(pointer, root))}')
    return f'{text[:-1]}, "$defs": {{{", ".join(definitions)}}}}}' if definitions else text
