"""A thinking budget by the names of each dialect, and what answers say of it."""

from __future__ import annotations

from typing import Any

import pytest

from server.http.anthropic import parse_messages
from server.http.llamacpp_completions import parse_completion as parse_llama
from server.http.openai_chat import parse_chat
from server.http.openai_completions import parse_completion
from server.http.responses import parse_responses
from specdec.core.types import Request
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import asked, violations
from tests.server.http.harness import CHAT, MESSAGES, Server, running

HI = {"messages": [{"role": "user", "content": "hi"}]}
NAMES: list[tuple[Any, dict[str, Any], str]] = [
    (parse_chat, HI, "thinking_token_budget"),
    (parse_chat, HI, "thinking_budget_tokens"),
    (parse_chat, HI, "reasoning_budget_tokens"),
    (parse_chat, HI, "thinking_budget"),
    (parse_completion, {"prompt": "a"}, "thinking_token_budget"),
    (parse_responses, {"input": "a"}, "thinking_token_budget"),
    (parse_llama, {"prompt": "a"}, "thinking_budget_tokens"),
    (parse_llama, {"prompt": "a"}, "reasoning_budget_tokens"),
    (parse_messages, HI | {"max_tokens": 90}, "thinking.budget_tokens"),
]


def with_budget(body: dict[str, Any], name: str, budget: Any) -> dict[str, Any]:
    if name == "thinking.budget_tokens":
        return body | {"thinking": {"type": "enabled", "budget_tokens": budget}}
    return body | {name: budget}


def budget_of(found: Any) -> int:
    request: Request = found.requests[0] if hasattr(found, "requests") else found.request
    return request.sampling.thinking_budget


@pytest.mark.parametrize(("read", "body", "name"), NAMES)
def test_every_name_reaches_the_engine(read: Any, body: dict[str, Any], name: str) -> None:
    assert budget_of(asked(read, body)) == -1
    for budget in (0, 32, -1):
        assert budget_of(asked(read, with_budget(body, name, budget))) == budget
    for wrong in (-2, 1.5, "32", True):
        assert [each.field for each in violations(read, with_budget(body, name, wrong))] == [name]


def test_anthropics_forms_without_a_budget() -> None:
    for kind in ("enabled", "adaptive", "disabled"):
        assert budget_of(asked(parse_messages, HI | {"max_tokens": 9, "thinking": {"type": kind}})) == -1


class Thinker(FakeTokenizer):
    """Marks thoughts."""

    thought_marks = (60, 62, (62,))


def warned(server: Server, path: str, name: str) -> list[str]:
    answer = server.ask(path, **with_budget(HI | {"max_tokens": 9}, name, 3))
    return [f"{note['param']}: {note['message']}" for note in answer.get("warnings", ())]


def test_an_answer_says_where_the_model_has_no_thoughts() -> None:
    told = "has no effect: the model does not mark its thoughts"
    with running(lambda: FakeTokenizer(has_tools=True)) as server:
        assert warned(server, CHAT, "thinking_budget") == [f"thinking_budget: {told}"]
        assert warned(server, MESSAGES, "thinking.budget_tokens") == [f"thinking.budget_tokens: {told}"]
        assert not server.ask(CHAT, **HI, thinking_budget=-1).get("warnings")
    with running(lambda: Thinker(has_tools=True)) as server:
        assert not warned(server, CHAT, "thinking_budget")
        assert not warned(server, MESSAGES, "thinking.budget_tokens")
        tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
        for grammar in ({"guided_regex": "a+"}, {"tools": [tool], "tool_choice": "required"}):
            answer = server.ask(CHAT, **HI, thinking_budget=3, max_tokens=4, **grammar)
            (note,) = answer["warnings"]
            assert note["message"] == "has no effect with a grammar, which begins with the answer"


@pytest.mark.parametrize("name", ["thinking_budget", "thinking_budget_tokens", "reasoning_budget_tokens"])
def test_an_endpoint_without_it_says_so(name: str) -> None:
    with running(lambda: FakeTokenizer(has_tools=True)) as server:
        for path in ("/v1/fim/completions", "/v1/completions"):
            answer = server.ask(path, prompt="a", max_tokens=2, **{name: 3})
            assert [note["param"] for note in answer["warnings"]] == [name]
