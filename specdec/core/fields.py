"""What a parameter of a request may be, said once.

Each field of the dataclasses in `specdec.core.types` that make up a request carries a `Param`: its kind with its
bounds, its description, and its names where it is sent. Validation, the gRPC messages, the JSON bodies of the HTTP
dialects, their OpenAPI schemas and the options of experiment arms all follow from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import StrEnum
from functools import cache
from types import MappingProxyType
from typing import Any

MIN_TEMPERATURE = 1e-6  # below, logits of 1e30 would overflow float32 when divided by it
MAX_DRAFT_NODES = 63  # of one tree, without its root
MAX_N = 16
MAX_LOGPROBS = 20
MAX_STOPS = 64
MAX_STOP_TEXT = 1024  # characters of a stop string; every one is looked for at every token
MAX_RULE_TEXT = 4096  # characters of what follows in the file, far more than a rule looks at
MAX_INDEXES = 8  # each one is looked through at every step
MAX_HEALING_PREFIX = 256  # characters; a word has far fewer
MAX_FINGERPRINT = 64  # characters of a numeric fingerprint; they have 32
MAX_NAME = 1024  # characters of a name that a caller gives: a session, a salt
MAX_BIAS = 1e4  # far beyond any logit, and far from what a float32 sum could turn into infinity
INT31, UINT32, UINT64 = (1 << 31) - 1, (1 << 32) - 1, (1 << 64) - 1
UTF8 = "must be text that UTF-8 can hold"
NAME_RULE = f"at most {MAX_NAME} characters of text that UTF-8 can hold, the tenant's name in front included"
OPENAI = "openai"
"""The dialect whose names JSON bodies have where `Param.names` says nothing else."""


class Kind:
    """What values a parameter may have."""

    __slots__ = ()

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        """What is wrong with ``value``; empty: nothing."""
        return ""

    def schema(self) -> dict[str, Any]:
        """As JSON Schema has it."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Number(Kind):
    """A finite number from ``low`` to ``high``; ``above``: not ``low`` itself. ``also``: one more that is fine."""

    low: float = -math.inf
    high: float = math.inf
    rule: str = ""
    above: bool = False
    also: float | None = None

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        inside = math.isfinite(value) and self.low <= value <= self.high and not (self.above and value == self.low)
        return "" if inside or value == self.also else self.rule or f"must lie in [{self.low:g}, {self.high:g}]"

    def schema(self) -> dict[str, Any]:
        low = self.low if self.also is None else min(self.low, self.also)
        bounds = {"exclusiveMinimum" if self.above else "minimum": low, "maximum": self.high}
        return {"type": "number"} | {word: _plain(bound) for word, bound in bounds.items() if math.isfinite(bound)}


@dataclass(frozen=True, slots=True)
class Int(Kind):
    """A whole number from ``low`` to ``high``. ``off``: what bodies may say beside ``low`` for a limit that is off."""

    low: int
    high: int
    rule: str = ""
    off: int | None = None

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        return "" if self.low <= value <= self.high else self.rule or f"must lie in {self.low}..{self.high}"

    def schema(self) -> dict[str, Any]:
        # Bounds that only say what fits into a number are left out.
        low, high = self.low if self.off is None else self.off, self.high
        bounds = ({"minimum": low} if abs(low) < INT31 else {}) | ({"maximum": high} if high < INT31 else {})
        return {"type": "integer", **bounds}


@dataclass(frozen=True, slots=True)
class Seed(Kind):
    """64 bits. In bodies also negative, and -1 for a random one."""

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
    """Text of at most ``limit`` characters, of those ``among`` only where that is not empty."""

    limit: int | None = None
    rule: str = UTF8
    among: str = ""

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        short = self.limit is None or len(value) <= self.limit
        return "" if short and encodable(value) and (not self.among or set(value) <= set(self.among)) else self.rule

    def schema(self) -> dict[str, Any]:
        return {"type": "string"} | ({} if self.limit is None else {"maxLength": self.limit})


@dataclass(frozen=True, slots=True)
class Texts(Kind):
    """Strings that are not empty, at most ``limit``, each of at most ``longest`` characters. ``alone``: a body may have
    one string instead of a list."""

    limit: int | None = None
    alone: bool = False
    longest: int | None = None

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        if self.limit is None:
            return ""
        if self.longest is not None and any(len(text) > self.longest for text in value):
            return f"at most {self.longest} characters each"
        return "" if all(value) and len(value) <= self.limit else f"at most {self.limit} non-empty strings"

    def schema(self) -> dict[str, Any]:
        text = {"type": "string"} | ({} if self.longest is None else {"maxLength": self.longest})
        listed = {"type": "array", "items": text}
        return {"oneOf": [text, listed]} if self.alone else listed


@dataclass(frozen=True, slots=True)
class TokenIds(Kind):
    """Ids of the model's vocabulary."""

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        whole = all(isinstance(i, int) for i in value)
        inside = whole and (not value or (min(value) >= 0 and max(value) < vocab_size))
        return "" if inside else f"ids must lie in [0, {vocab_size})"

    def schema(self) -> dict[str, Any]:
        return {"type": "array", "items": {"type": "integer", "minimum": 0}}


@dataclass(frozen=True, slots=True)
class LogitBias(Kind):
    """Pairs of a token id and what is added to its logit."""

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        good = all(0 <= token < vocab_size and math.isfinite(b) and abs(b) <= MAX_BIAS for token, b in value)
        return "" if good else f"ids must lie in [0, {vocab_size}) and biases in [-{MAX_BIAS:g}, {MAX_BIAS:g}]"

    def schema(self) -> dict[str, Any]:
        return {"type": "object", "additionalProperties": {"type": "number"}}


@dataclass(frozen=True, slots=True)
class OneOf(Kind):
    """One of ``values``."""

    values: Sequence[str]
    rule: str = ""

    def problem(self, value: Any, vocab_size: int = 0) -> str:
        return "" if value in self.values else self.rule or f"must be one of {', '.join(self.values)}"

    def schema(self) -> dict[str, Any]:
        return {"enum": [str(value) for value in self.values]}


@dataclass(frozen=True, slots=True)
class Param:
    """One parameter. A value of None is never checked: it leaves the choice to the engine.

    ``path``: the field in the options message, with dots where it lies deeper; empty: as it is called here.
    ``scale``: so many of the message's units are one of ours. ``label``: its name in refusals; empty: as it is called
    here. ``names``: its name in the bodies of a dialect, None where there is none.
    """

    name: str
    kind: Kind
    default: Any
    doc: str
    path: str
    scale: float
    label: str
    names: Mapping[str, str | None]

    def json_name(self, dialect: str = OPENAI) -> str | None:
        """Its name in bodies of ``dialect``."""
        return self.names.get(dialect, self.names.get(OPENAI, self.name))

    def schema(self, default: Any = None) -> dict[str, Any]:
        """As OpenAPI describes it. ``default``: the dialect's own, where it has one."""
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
    names: Mapping[str, str | None] = MappingProxyType({}),
) -> Any:
    """A dataclass field with a `Param`. ``json``: its name in bodies; None: they do not have it."""
    own = {} if json == "" else {OPENAI: json}

    def make(name: str) -> Param:
        return Param(name, kind, default, doc, path or name, scale, label or name, MappingProxyType({**own, **names}))

    return field(default=default, metadata={"param": make})


def params_of(record: Any) -> tuple[Param, ...]:
    """Those of a dataclass, in its order."""
    return _params_of(record)


@cache
def _params_of(record: Any) -> tuple[Param, ...]:
    return tuple(f.metadata["param"](f.name) for f in fields(record) if "param" in f.metadata)


def encodable(text: str) -> bool:
    """Whether UTF-8 can hold ``text``: halves of surrogate pairs it can not."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _plain(number: Any) -> Any:
    return int(number) if isinstance(number, float) and number.is_integer() else number
