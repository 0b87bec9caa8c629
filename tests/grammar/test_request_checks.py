"""Checks of a grammar before it is compiled, and of the fields that only change speed."""

from __future__ import annotations

from typing import Any

import pytest

from specdec.core.types import EngineInfo, GrammarKind, GrammarParams, Request, SpeculationParams
from specdec.engine.validation import MAX_GRAMMAR_BYTES, MAX_SCHEMA_BYTES, check_requests
from specdec.errors import InvalidRequestError

KIND = GrammarKind


INFO = EngineInfo("m", None, "int8", "native", "bitwise", 64, 100, 64, 1, ("suffix",), (0,), 1, "0", "fp32")


def check(**changes: Any) -> None:
    check_requests([Request("r", (1, 2), **changes)], INFO)


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
        ("grammar", {"grammar": GrammarParams(KIND.EBNF, "a" * (MAX_SCHEMA_BYTES + 1), of_schemas=True)}),
        ("grammar", {"grammar": GrammarParams(KIND.JSON_SCHEMA, "a" * (MAX_SCHEMA_BYTES + 1))}),
    ],
)
def test_a_bad_field_is_named(field: str, changes: dict[str, Any]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        check(**changes)
    assert [violation.field for violation in caught.value.violations] == [field]


def test_an_unknown_index_is_named_with_the_way_out() -> None:
    with pytest.raises(InvalidRequestError, match=r"no index is named projct; see engine\.indexes"):
        check(speculation=SpeculationParams(indexes=("projct",)))


def test_good_fields_pass() -> None:
    check(prediction_ids=(0, 99), session="é", target_tpot_ms=0.5, grammar=GrammarParams(KIND.JSON_OBJECT))
    check(grammar=GrammarParams(KIND.JSON_SCHEMA, "a" * MAX_SCHEMA_BYTES))
    check(grammar=GrammarParams(KIND.EBNF, "a" * MAX_SCHEMA_BYTES, of_schemas=True))
    check(grammar=GrammarParams(KIND.REGEX, "a" * MAX_GRAMMAR_BYTES))
