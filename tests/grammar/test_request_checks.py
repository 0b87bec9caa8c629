"""What the engine's door says of a grammar before it is compiled, and of the fields that only change speed."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.core.types import GrammarKind, GrammarParams, Request
from specdec.engine.validation import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, validate_request
from specdec.errors import InvalidRequestError

KIND = GrammarKind


def check(**changes: Any) -> None:
    validate_request(Request("r", (1, 2), **changes), 100, 64, ("suffix",))


@pytest.mark.parametrize(
    ("field", "changes"),
    [
        ("prediction", {"prediction_ids": (1, 100)}),
        ("prediction", {"prediction_ids": (-1,)}),
        ("session", {"session": "\ud800"}),
        ("target_tpot_ms", {"target_tpot_ms": 0.0}),
        ("target_tpot_ms", {"target_tpot_ms": -5.0}),
        ("target_tpot_ms", {"target_tpot_ms": float("nan")}),
        ("target_tpot_ms", {"target_tpot_ms": float("inf")}),
        ("grammar", {"grammar": GrammarParams("poem", "x")}),
        ("grammar", {"grammar": GrammarParams(KIND.JSON_OBJECT, "{}")}),
        ("grammar", {"grammar": GrammarParams(KIND.REGEX)}),
        ("grammar", {"grammar": GrammarParams(KIND.CHOICE, "  ")}),
        ("grammar", {"grammar": GrammarParams(KIND.REGEX, "\ud800")}),
        ("grammar", {"grammar": GrammarParams(KIND.EBNF, "é" * (MAX_GRAMMAR_BYTES // 2) + "a")}),
        ("grammar", {"grammar": GrammarParams(KIND.JSON_SCHEMA, "a" * (MAX_SCHEMA_BYTES + 1))}),
    ],
)
def test_a_bad_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**changes)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_good_fields_pass() -> None:
    check(prediction_ids=(0, 99), session="é", target_tpot_ms=0.5, grammar=GrammarParams(KIND.JSON_OBJECT))
    check(grammar=GrammarParams(KIND.JSON_SCHEMA, "a" * MAX_SCHEMA_BYTES))
    check(grammar=GrammarParams(KIND.REGEX, "a" * MAX_GRAMMAR_BYTES))
