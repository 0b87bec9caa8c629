"""The parameters of a request: kinds, bounds and names.

Each field of the request dataclasses in `specdec.core.types` carries a `Param` with its kind, bounds, description and
names. Validation, the gRPC messages, the JSON bodies of the HTTP dialects, their OpenAPI schemas and the options of
experiment arms are derived from it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence, Sized
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from typing import Any, ClassVar

MIN_TEMPERATURE = 1e-6  # below it, logits of 1e30 overflow float32 when they are divided by it
MAX_DRAFT_NODES = 63  # nodes of one tree, without its root
MAX_N = 16  # samples of one request
MAX_LOGPROBS = 20  # tokens per position
MAX_STOPS = 64  # strings; each is searched for at every token
MAX_STOP_TEXT = 1024  # characters of a stop string
MAX_STOP_TOKENS = 1024  # ids; a model has a few end tokens, a caller adds some of its own
MAX_BIASED_TOKENS = 4096  # entries of logit_bias; to allow few tokens of many, allowed_token_ids is shorter
MAX_ALLOWED_TOKENS = 1 << 18  # ids, the largest vocabularies of published models
MAX_PREDICTION_TOKENS = 1 << 17  # ids, the longest usual context; an index of a prediction takes 0.25 kB per token
MAX_PROMPT_TOKENS = 1 << 20  # ids, the longest contexts of published models; the model's own is the real limit
MAX_RESUMED_TOKENS = 1 << 18  # ids, longer than the answers that models give
MAX_OBJECTS = 1 << 13  # messages, files, edits or choices of one list; reading them takes some 10 ms
MAX_TOOLS = 1 << 10  # of a conversation; the grammar of a required call and the prompt grow with each
MAX_RULE_TEXT = 4096  # characters of the text behind the gap; a rule reads far fewer
MAX_INDEXES = 8  # indexes; each is searched at every step
MAX_DRAFTERS = 64  # names; an engine loads fewer than ten
MAX_HEALING_PREFIX = 256  # characters; a token has far fewer
MAX_FINGERPRINT = 64  # characters of a numeric fingerprint; they have 32
MAX_NAME = 1024  # characters of a name that a caller chooses: a session, a salt
MAX_BIAS = 1e4  # logits; far above any logit, and far below what overflows a float32 sum
INT31, UINT32, UINT64 = (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1
UTF8 = "must be text that UTF-8 can hold"


class Kind:
    """The values that a parameter accepts."""

    __slots__ = ()

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        """Return what is wrong with ``value``, or an empty string."""
        return ""

    def schema(self) -> dict[str, Any]:
        """Return the JSON Schema."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number in [low, high]."""

    low: float = -math.inf
    high: float = math.inf
    rule: str = ""  # replaces the text of a refusal
    above: bool = False  # excludes ``low``
    also: float | None = None  # a value outside the range that is accepted too

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        inside = math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)
        return "" if inside or value == self.also else self.rule or f"must lie in [{self.low:g}, {self.high:g}]"

    def schema(self) -> dict[str, Any]:
        low = self.low if self.also is None else min(self.low, self.also)
        bounds = {"exclusiveMinimum" if self.above else "minimum": low, "maximum": self.high}
        return {"type": "number"} | {word: _plain(bound) for word, bound in bounds.items() if math.isfinite(bound)}


@dataclass(frozen=True, slots=True)
class Int(Kind):
    """A whole number in low..high."""

    low: int
    high: int
    rule: str = ""  # replaces the text of a refusal
    off: int | None = None  # JSON bodies may write this for the default, which is no limit

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        return "" if self.low <= value <= self.high else self.rule or f"must lie in {self.low}..{self.high}"

    def schema(self) -> dict[str, Any]:
        # A bound that only says what an integer type holds is left out.
        low, high = self.low if self.off is None else self.off, self.high
        bounds = ({"minimum": low} if abs(low) < INT31 else {}) | ({"maximum": high} if high < INT31 else {})
        return {"type": "integer", **bounds}


@dataclass(frozen=True, slots=True)
class Seed(Kind):
    """An unsigned 64-bit number. JSON bodies may also write it signed; there, -1 asks for a random seed."""

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        return "" if 0 <= value <= UINT64 else "must be an unsigned 64-bit number"

    def schema(self) -> dict[str, Any]:
        return {"type": "integer"}


@dataclass(frozen=True, slots=True)
class Flag(Kind):
    """True or false."""

    def schema(self) -> dict[str, Any]:
        return {"type": "boolean"}


@dataclass(frozen=True, slots=True)
class Text(Kind):
    """Text that UTF-8 can hold."""

    limit: int  # characters
    rule: str = ""  # replaces the text of a refusal
    among: str = ""  # the characters that are accepted; empty: any

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        sound = len(value) <= self.limit and encodable(value) and (not self.among or set(value) <= set(self.among))
        return "" if sound else self.rule or f"at most {self.limit} characters of text that UTF-8 can hold"

    def schema(self) -> dict[str, Any]:
        return {"type": "string", "maxLength": self.limit}


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """One of ``values``."""

    values: Sequence[str]
    rule: str = ""  # replaces the text of a refusal

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        return "" if value in self.values else self.rule or f"must be one of {', '.join(self.values)}"

    def schema(self) -> dict[str, Any]:
        return {"enum": [str(value) for value in self.values]}


@dataclass(frozen=True, slots=True)
class Repeated(Kind):
    """A list. Readers refuse one of more than ``limit`` items by `excess` before they copy it."""

    limit: int
    items: ClassVar[str] = "entries"  # in a refusal

    def excess(self, count: int) -> str:
        """Return what is wrong with a list of ``count`` items, or an empty string."""
        return "" if count <= self.limit else f"at most {self.limit} {self.items}, got {count}"

    def problem(self, value: Sized, vocab_size: int = 0) -> str:
        return self.excess(len(value)) or self._item_problem(value, vocab_size)

    def _item_problem(self, value: Any, vocab_size: int) -> str:
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Texts(Repeated):
    """Non-empty strings."""

    items = "non-empty strings"
    longest: int = MAX_NAME  # characters of each
    alone: bool = False  # JSON bodies may have one string instead of a list

    def _item_problem(self, value: Iterable[str], vocab_size: int) -> str:
        if any(len(text) > self.longest for text in value):
            return f"at most {self.longest} characters each"
        return "" if all(value) else "must not hold an empty string"

    def schema(self) -> dict[str, Any]:
        text = {"type": "string", "maxLength": self.longest}
        listed = {"type": "array", "items": text}
        return {"oneOf": [text, listed]} if self.alone else listed


@dataclass(frozen=True, slots=True)
class TokenIds(Repeated):
    """Ids of the model's vocabulary."""

    items = "ids"
    distinct: bool = False  # a repeated id changes nothing, so the vocabulary bounds the list too

    def _item_problem(self, value: Any, vocab_size: int) -> str:
        if self.distinct and len(value) > vocab_size:
            return f"at most {vocab_size} ids, got {len(value)}"
        whole = all(isinstance(i, int) for i in value)
        inside = whole and (not value or (min(value) >= 0 and max(value) < vocab_size))
        return "" if inside else f"ids must lie in [0, {vocab_size})"

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}}


@dataclass(frozen=True, slots=True)
class LogitBias(Repeated):
    """Pairs of a token id and what is added to its logit."""

    def _item_problem(self, value: Any, vocab_size: int) -> str:
        good = all(0 <= token < vocab_size and math.isfinite(b) and abs(b) <= MAX_BIAS for token, b in value)
        return "" if good else f"ids must lie in [0, {vocab_size}) and biases in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "number"}}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. A value of None passes every check: it leaves the choice to the engine."""

    name: str
    kind: Kind
    default: Any
    doc: str
    path: str  # of its field in the options message, with dots where it lies deeper
    scale: float  # units of the message per unit of the dataclass
    label: str  # its name in refusals
    json_name: str | None  # in JSON bodies, unless a dialect has another; None: bodies do not have it

    def schema(self, default: Any = None) -> dict[str, Any]:
        """Return its JSON Schema for OpenAPI. ``default``: the dialect's own default, if it has one."""
        known = self.default if default is None else default
        plain = isinstance(known, int | float | StrEnum) and (self.kind != Flag() or known is True)
        schema = self.kind.schema() | ({"default": _plain(known)} if plain else {})
        return schema | ({"description": self.doc} if self.doc else {})


def param(
    default: Any,
    kind: Kind,
    doc: str = "",
    *,
    path: str = "",
    scale: float = 1.0,
    label: str = "",
    json: str | None = "",
) -> Any:
    """Return a dataclass field with a `Param`.

    ``path`` and ``label`` default to the field's name. ``json`` is its name in JSON bodies: empty for the field's name,
    None if bodies do not have it.
    """

    def make(name: str) -> Param:
        return Param(name, kind, default, doc, path or name, scale, label or name, name if json == "" else json)

    return field(default=default, metadata={"param": make})


@cache
def params_of(record: Any) -> tuple[Param, ...]:
    """Return the parameters of a dataclass in field order."""
    return tuple(f.metadata["param"](f.name) for f in fields(record) if "param" in f.metadata)


def encodable(text: str) -> bool:
    """Return whether UTF-8 can hold ``text``; it cannot hold half of a surrogate pair."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number
