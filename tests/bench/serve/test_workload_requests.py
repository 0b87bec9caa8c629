"""The prompts of load tests."""

from __future__ import annotations

from itertools import islice, pairwise

import pytest

from bench.serve import SERVE_WORKLOADS
from bench.serve.schedule import endless_requests
from specdec.load.request import LoadRequest


def first_asks(name: str, count: int, max_tokens: int | None = None) -> list[LoadRequest]:
    return list(islice(endless_requests(name, max_tokens), count))


@pytest.mark.parametrize("name", SERVE_WORKLOADS)
def test_no_prompt_occurs_twice(name: str) -> None:
    first = first_asks(name, 400, 24)
    assert len({(ask.text, ask.chat, ask.gap) for ask in first}) == len(first)
    assert all((bool(a.text), bool(a.chat), a.gap is not None).count(True) == 1 for a in first)
    assert all(1 <= ask.max_tokens <= 24 for ask in first)
    rounds = {ask.name.partition("#")[2] for ask in first}
    assert len({ask.salt for ask in first}) == (1 if name == "shared-prefix" else len(rounds))


def test_shared_prefixes_are_shared_in_every_round() -> None:
    texts = [ask.text for ask in first_asks("shared-prefix", 120)]
    assert len({text[:8000] for text in texts}) == 1
    assert len(set(texts)) == 120


def test_edits_carry_their_prediction_and_typing_goes_on() -> None:
    assert all(ask.prediction in ask.chat[0].content for ask in first_asks("edit", 20))
    gaps = [ask.gap for ask in first_asks("typing", 4)]
    assert all(a and b and b.prefix.startswith(a.prefix) and a.suffix == b.suffix for a, b in pairwise(gaps))


def test_mixed_has_every_kind() -> None:
    kinds = {ask.name.partition("/")[0] for ask in islice(endless_requests("mixed"), 8)}
    assert kinds == {"HumanEval", "edit", "fim", "chat"}
