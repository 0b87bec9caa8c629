"""Bodies from the JSON schemas of the OpenAPI document: good ones, ones with a flaw, and bytes that are no JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from random import Random
from typing import Any

from tests.fuzz.words import GRAMMARS, INTEGERS, NUMBERS, TEXTS

# Otherwise most accepted requests would run to the end of the context, and few would be tried.
_SHORT = ("max_tokens", "max_completion_tokens", "max_output_tokens", "n_predict", "num_predict")
_DEEPEST = 5
_NESTED = (b"[", b'{"a":', b'{"prompt":[')


class SchemaFuzzer:
    """Draws from ``random``, so the same one gives the same bodies."""

    def __init__(self, random: Random) -> None:
        self._random = random

    def body(self, schema: Mapping[str, Any]) -> bytes:
        """One body of ``schema``, or something like it."""
        draw = self._random
        kind = draw.random()
        if kind < 0.04:
            return draw.randbytes(draw.randrange(60))
        if kind < 0.06:
            return draw.choice(_NESTED) * draw.randrange(1, 4000) + b"1"
        value = self.anything(0) if kind < 0.1 else self.value(schema, 0)
        text = json.dumps(value, ensure_ascii=draw.random() < 0.5)
        data = text.encode("utf-8", "surrogatepass")
        if kind < 0.15:
            return data[: draw.randrange(len(data) + 1)]
        if kind < 0.2 and data:
            at = draw.randrange(len(data))
            return data[:at] + draw.randbytes(draw.randrange(3)) + data[at + 1 :]
        return data

    def value(self, schema: Mapping[str, Any], depth: int) -> Any:
        """A value of ``schema``, mostly."""
        draw = self._random
        if draw.random() < 0.08 or depth > _DEEPEST:
            return self.anything(depth)
        for choice in ("anyOf", "oneOf"):
            if choice in schema:
                return self.value(draw.choice(schema[choice]), depth)
        if "enum" in schema:
            return draw.choice(schema["enum"])
        kind = schema.get("type")
        kind = draw.choice(kind) if isinstance(kind, list) else kind
        match kind:
            case "object":
                return self._object(schema, depth)
            case "array":
                length = draw.choice((schema.get("minItems", 0), 1, 1, 2, 3, 20 if draw.random() < 0.05 else 1))
                return [self.value(schema.get("items", {}), depth + 1) for _ in range(length)]
            case "string":
                return draw.choice(GRAMMARS) if draw.random() < 0.15 else draw.choice(TEXTS)
            case "integer":
                return draw.choice(INTEGERS[:10]) if draw.random() < 0.8 else draw.choice(INTEGERS)
            case "number":
                return draw.choice(NUMBERS)
            case "boolean":
                return draw.random() < 0.5
        return self.anything(depth)

    def anything(self, depth: int) -> Any:
        """Any JSON, and NaN."""
        draw = self._random
        kind = draw.randrange(8 if depth < _DEEPEST else 6)
        if kind == 6:
            return [self.anything(depth + 1) for _ in range(draw.randrange(4))]
        if kind == 7:
            return {draw.choice(TEXTS): self.anything(depth + 1) for _ in range(draw.randrange(4))}
        scalars: tuple[Any, ...] = (
            None, draw.random() < 0.5, draw.choice(INTEGERS), draw.choice(NUMBERS), draw.choice(TEXTS),
            draw.choice(GRAMMARS),
        )  # fmt: skip
        return scalars[kind]

    def _object(self, schema: Mapping[str, Any], depth: int) -> dict[str, Any]:
        draw = self._random
        fields: Mapping[str, Any] = schema.get("properties", {})
        required = schema.get("required", ())
        likely = min(0.5, 3 / max(1, len(fields)))
        found: dict[str, Any] = {}
        for name, inner in fields.items():
            if draw.random() < (0.95 if name in required else likely):
                found[name] = self.value(inner, depth + 1)
        for name in _SHORT:
            if name in fields and draw.random() < 0.9:
                found[name] = draw.choice((0, 1, 2, 3, 8))
        extra = schema.get("additionalProperties")
        if isinstance(extra, Mapping):
            found |= {draw.choice(("0", "5", "383", "384", "-1", "x")): self.value(extra, depth + 1) for _ in range(2)}
        if draw.random() < 0.05 or (not fields and extra is None and draw.random() < 0.7):
            found[draw.choice(TEXTS)] = self.anything(depth + 1)
        return found
