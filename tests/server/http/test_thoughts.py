"""Thoughts are apart from the answer, in each dialect's own form."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from server.http.anthropic import parse_messages
from server.http.ollama import parse_generate
from server.http.openai_chat import parse_chat
from server.http.responses import parse_responses
from specdec.errors import InvalidRequestError
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.anthropic.test_messages import TOOLS as ANTHROPIC_TOOLS
from tests.server.http.calls import Fim, Told, asked, make_context
from tests.server.http.harness import CHAT, MESSAGES, RESPOND, Server, running
from tests.server.http.ollama.lines import lines

OLLAMA_CHAT, OLLAMA_GENERATE = "/api/chat", "/api/generate"


class Thinker(FakeTokenizer):
    """Marks thoughts as <...>. The prompt is the last message alone, which the fake engine answers with."""

    thought_marks = (60, 62, (62,))

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        return self.encode(messages[-1]["content"], add_special=False)


class Begun(Thinker):
    """Its prompts end inside of thoughts."""

    def leaves_thoughts_open(self, ids: Sequence[int]) -> bool:
        return True


class Special(Thinker):
    """Its marks are special tokens, which texts leave out by default."""

    special_ids = frozenset({2, 60, 62})


class Resumed(Thinker):
    """Its prompts may end inside of thoughts. It writes the variables of the template down."""

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        return self.encode(repr(options.get("variables")), add_special=False)

    def leaves_thoughts_open(self, ids: Sequence[int]) -> bool:
        return [i for i in ids if i in (60, 62)][-1:] == [60]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with running(lambda: Thinker(has_tools=True)) as found:
        yield found


def said(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def chat(server: Server, text: str, **fields: Any) -> tuple[str | None, str]:
    """The thoughts and the content of an answer, which are the same in a stream."""
    answer = server.ask(CHAT, messages=said(text), **fields)
    message = answer["choices"][0]["message"]
    found = message.get("reasoning_content"), message["content"]
    *chunks, done = server.stream(CHAT, messages=said(text), stream_options={"include_usage": True}, **fields)
    assert (done, chunks[-1]["usage"]) == ("[DONE]", answer["usage"])
    deltas = [choice["delta"] for chunk in chunks for choice in chunk["choices"]]
    streamed = ["".join(delta.get(name) or "" for delta in deltas) for name in ("reasoning_content", "content")]
    assert streamed == [found[0] or "", found[1]]
    assert all(delta.keys() <= {"role", "content"} or delta.keys() == {"reasoning_content"} for delta in deltas)
    return found


@pytest.mark.parametrize(
    ("text", "thoughts", "content"),
    [
        ("<plan>ok", "plan", "ok"),
        ("\n <\nplan a\nplan b\n>\n\nok >", "plan a\nplan b", "ok >"),
        ("<plan \n", "plan", ""),
        ("<\n\n>\n\nok", None, "ok"),
        (" ok <plan>", None, " ok <plan>"),
        ("plan>ok", None, "plan>ok"),
    ],
)
def test_content_has_no_thoughts(server: Server, text: str, thoughts: str | None, content: str) -> None:
    assert chat(server, text) == (thoughts, content)
    assert chat(server, text, separate_reasoning=False) == (None, text)


def test_a_prompt_may_end_inside_of_thoughts() -> None:
    with running(Begun) as server:
        assert chat(server, " plan\n>\nok") == ("plan", "ok")
        assert chat(server, "plan") == ("plan", "")
        assert chat(server, "abc", guided_regex="[a-c]+") == (None, "abc")  # the answer alone follows a grammar


def test_marks_that_are_special_tokens_are_shown() -> None:
    """Else the text would not say where thoughts end."""

    def shown(tokenizer: FakeTokenizer, **fields: Any) -> bool:
        request = asked(parse_chat, {"messages": said("a"), **fields}, server=make_context(tokenizer)).request
        return not request.output.skip_special_tokens

    assert shown(Special())
    assert shown(Special(), separate_reasoning=False)
    assert not shown(Thinker())


def reasoning_tokens(answer: dict[str, Any]) -> int:
    found: int = answer["usage"]["completion_tokens_details"]["reasoning_tokens"]
    return found


def test_usage_counts_the_tokens_of_thoughts(server: Server) -> None:
    for text, count in (("<plan>ok", 6), (" <plan>>", 7), ("<plan", 5), ("<>ok", 2), ("ok <plan>", 0)):
        assert reasoning_tokens(server.ask(CHAT, messages=said(text))) == count
    with running(Begun) as begun:  # each further sample of the fake begins a character later
        assert reasoning_tokens(begun.ask(CHAT, messages=said("plan>ok"), n=3)) == 5 + 4 + 3


def test_tools_are_called_after_thoughts(server: Server) -> None:
    look = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    call = '{"name": "look", "arguments": {}}'  # without its mark, which would be one of thoughts here
    (choice,) = server.ask(CHAT, messages=said(f"<{call}>\n{call}"), tools=[look])["choices"]
    assert choice["message"]["reasoning_content"] == call
    assert [each["function"]["name"] for each in choice["message"]["tool_calls"]] == ["look"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    text = f"<{call}>{call}"
    thoughts, called = server.ask(MESSAGES, messages=said(text), max_tokens=99, tools=ANTHROPIC_TOOLS)["content"]
    assert (thoughts["thinking"], called["name"]) == (call, "look")


def test_an_answer_of_calls_alone_or_in_a_gap_has_no_thoughts() -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}
    for choice, has_thoughts in (("auto", True), ("required", False)):
        body = {"messages": said("a"), "tools": [tool], "tool_choice": choice}
        form = asked(parse_chat, body, server=make_context(Thinker(has_tools=True))).form
        assert (form.thoughts is not None) is has_thoughts
    body = {"prompt": "a", "suffix": "b"}
    assert asked(parse_generate, body, server=make_context(Thinker(), Fim())).form.thoughts is None
    assert asked(parse_generate, {"prompt": "a"}, server=make_context(Thinker(), Fim())).form.thoughts is not None


class Opening(Resumed):
    """Its template opens the thoughts of an answer."""

    thought_marks = (60, 62, (10, 62, 10))

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        return self.encode("".join(message["content"] for message in messages) + "<", add_special=False)


def test_an_answer_that_a_call_begins_has_no_thoughts() -> None:
    begun = [*said("a"), {"role": "assistant", "content": "{"}]
    bodies: list[tuple[Any, dict[str, Any]]] = [
        (parse_messages, {"messages": begun, "max_tokens": 9}),
        (parse_chat, {"messages": begun, "continue_final_message": True}),
    ]
    for parse, body in bodies:
        for more, prompt in (({}, b"a<\n>\n{"), ({"messages": said("a")}, b"a<")):
            found = asked(parse, body | more | {"continue_final_message": not more}, server=make_context(Opening()))
            assert bytes(found.request.prompt_ids) == prompt
            assert found.form.thoughts.are_open is bool(more)
    whole = {"messages": begun, "continue_final_message": True, "separate_reasoning": False}
    assert bytes(asked(parse_chat, whole, server=make_context(Opening())).request.prompt_ids) == b"a<{"


def test_a_thinkers_answer_is_resumed_as_a_whole_text() -> None:
    server = make_context(Thinker())
    resume = {"token_ids": [60], "numeric_fingerprint": server.models.first.info.numeric_fingerprint}
    body = {"messages": said("a"), "seed": 1, "resume": resume}
    with pytest.raises(InvalidRequestError, match=r"resume: .* set separate_reasoning to false"):
        asked(parse_chat, body, server=server)
    assert asked(parse_chat, {**body, "separate_reasoning": False}, server=server).request.resume is not None


def test_anthropics_blocks(server: Server) -> None:
    answer = server.ask(MESSAGES, messages=said("<plan>ok"), max_tokens=99)
    assert answer["content"] == [
        {"type": "thinking", "thinking": "plan", "signature": ""},
        {"type": "text", "text": "ok"},
    ]
    events = server.named_stream(MESSAGES, messages=said("<plan>ok"), max_tokens=99)
    assert [event for event in events if event["type"].startswith("content_block")] == [
        {"type": "content_block_start", "index": 0,
         "content_block": {"type": "thinking", "thinking": "", "signature": ""}},
        *({"type": "content_block_delta", "index": 0, "delta": {"type": "thinking_delta", "thinking": c}}
          for c in "plan"),
        {"type": "content_block_stop", "index": 0},
        {"type": "content_block_start", "index": 1, "content_block": {"type": "text", "text": ""}},
        *({"type": "content_block_delta", "index": 1, "delta": {"type": "text_delta", "text": c}} for c in "ok"),
        {"type": "content_block_stop", "index": 1},
    ]  # fmt: skip


def test_items_of_responses(server: Server) -> None:
    body = {"input": "<plan>ok", "include": ["message.output_text.logprobs"]}
    answer = server.ask(RESPOND, **body)
    thoughts, message = answer["output"]
    assert thoughts.pop("id").startswith("rs_")
    assert thoughts == {
        "type": "reasoning", "status": "completed", "summary": [],
        "content": [{"type": "reasoning_text", "text": "plan"}],
    }  # fmt: skip
    (part,) = message["content"]
    assert (part["text"], "".join(row["token"] for row in part["logprobs"])) == ("ok", "ok")
    assert answer["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}
    events = server.named_stream(RESPOND, **body)
    whole = events[-1]["response"]
    assert [item | {"id": ""} for item in whole["output"]] == [thoughts | {"id": ""}, message | {"id": ""}]
    assert whole["usage"] == answer["usage"]
    at = {"item_id": whole["output"][0]["id"], "output_index": 0, "content_index": 0}
    rest = [event for event in events if event.pop("sequence_number") >= 0 and event.get("output_index") == 0]
    empty = {**thoughts, "id": at["item_id"], "status": "in_progress", "content": []}
    full = {**thoughts, "id": at["item_id"]}
    part = {"type": "reasoning_text", "text": "plan"}
    assert rest == [
        {"type": "response.output_item.added", "output_index": 0, "item": empty},
        {"type": "response.content_part.added", **at, "part": part | {"text": ""}},
        *({"type": "response.reasoning_text.delta", **at, "delta": c} for c in "plan"),
        {"type": "response.reasoning_text.done", **at, "text": "plan"},
        {"type": "response.content_part.done", **at, "part": part},
        {"type": "response.output_item.done", "output_index": 0, "item": full},
    ]
    texts = [event for event in events if event["type"] == "response.output_text.delta"]
    assert [(event["delta"], event["logprobs"][0]["token"]) for event in texts] == [("o", "o"), ("k", "k")]


def test_ollamas_thinking(server: Server) -> None:
    for fields in ({}, {"think": True}, {"think": "low"}):
        body = {"messages": said("<plan>ok"), **fields}
        assert server.ask(OLLAMA_CHAT, stream=False, **body)["message"] == {
            "role": "assistant", "content": "ok", "thinking": "plan",
        }  # fmt: skip
        found = [line["message"] for line in lines(server, OLLAMA_CHAT, **body)]
        assert [message.get("thinking", "") for message in found] == [*"plan", "", "", ""]
        assert "".join(message["content"] for message in found) == "ok"
    answer = server.ask(OLLAMA_GENERATE, stream=False, prompt="<plan>ok")
    assert (answer["response"], answer["thinking"]) == ("ok", "plan")
    with running(Resumed) as other:
        for wrong in ("false", 17, {}):
            assert other.client.post(OLLAMA_CHAT, json={"messages": said("a"), "think": wrong}).status_code == 400
        for think in (True, "low"):
            told = other.ask(OLLAMA_CHAT, stream=False, messages=said("a"), think=think)["message"]["content"]
            assert told == "{'enable_thinking': True}"
    raw = server.ask(OLLAMA_GENERATE, stream=False, prompt="<plan>ok", raw=True)
    assert (raw["response"].lstrip("\x02"), "thinking" in raw) == ("<plan>ok", False)
    assert "thinking" in server.ask("/api/show")["capabilities"]


def test_ollama_refuses_to_think_without_thoughts() -> None:
    with running(FakeTokenizer) as server:
        answer = server.client.post(OLLAMA_CHAT, json={"messages": said("a"), "think": True})
        assert (answer.status_code, "does not support thinking" in answer.text) == (400, True)
        assert "thinking" not in server.ask("/api/show")["capabilities"]


def test_earlier_thoughts_reach_the_template() -> None:
    blocks: list[dict[str, Any]] = [
        {"type": "thinking", "thinking": "plan", "signature": ""},
        {"type": "redacted_thinking", "data": "x"},
        {"type": "thinking", "thinking": "b", "signature": ""},
        {"type": "text", "text": "ok"},
    ]
    items = [
        {"type": "message", "role": "user", "content": "hi"},
        {"type": "reasoning", "id": "rs_1", "summary": [], "content": [{"type": "reasoning_text", "text": "plan"}]},
        {"type": "reasoning", "id": "rs_2", "summary": [], "content": [{"type": "reasoning_text", "text": "b"}]},
        {"type": "reasoning", "id": "rs_3", "summary": [], "encrypted_content": "x"},
        {"type": "reasoning", "id": "rs_4", "summary": [], "content": [{"type": "text", "text": "c"}]},
        {"type": "message", "role": "assistant", "content": "ok"},
        {"type": "reasoning", "id": "rs_5", "summary": [], "content": [{"type": "reasoning_text", "text": "unsaid"}]},
        {"type": "message", "role": "user", "content": "more"},
        {"type": "message", "role": "assistant", "content": "yes"},
        {"type": "message", "role": "user", "content": "so"},
        {"type": "reasoning", "id": "rs_6", "summary": [], "content": []},
    ]
    unsaid = {"role": "assistant", "content": [{"type": "thinking", "thinking": "unsaid", "signature": ""}]}
    rest = [*said("more"), {"role": "assistant", "content": "yes"}, *said("so")]
    turns = [*said("hi"), {"role": "assistant", "content": blocks}, unsaid, *rest, unsaid]
    plain = [*said("hi"), {"role": "assistant", "content": "ok", "reasoning_content": "plan\nb"}, *rest]
    for parse, body in (
        (parse_messages, {"messages": turns, "max_tokens": 9}),
        (parse_responses, {"input": items}),
        (parse_chat, {"messages": plain}),
    ):
        tokenizer = Told()
        asked(parse, body, server=make_context(tokenizer))  # type: ignore[arg-type]
        assert tokenizer.messages == plain
