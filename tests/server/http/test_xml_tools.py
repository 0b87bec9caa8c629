"""Tool calls in the form of Qwen3-Coder in every dialect, and from a tiny model to OpenAI's client."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from specdec.models.tool_forms import ToolForm
from tests.models.tiny import make_tiny_model
from tests.models.xml_template import xml_template
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import CHAT, MESSAGES, RESPOND, Server, running
from tests.server.http.ollama.lines import lines

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "n": {"type": "integer"}}}
FUNCTION = {"name": "f", "parameters": SCHEMA}
SAID = '<function=f><parameter=a>\n "x\n</parameter><parameter=n>2.0</parameter></function>'
ARGUMENTS = {"a": ' "x', "n": 2}


class XmlTokenizer(FakeTokenizer):
    """Leaves out the prompt's beginning, so that the fake engine has room to echo the call."""

    def __init__(self) -> None:
        super().__init__(has_tools=True, tool_form=ToolForm.QWEN_XML)

    def encode_chat(self, *given: Any, **options: Any) -> list[int]:
        (_, text) = self.decode(super().encode_chat(*given, **options)).split("user:")
        return self.encode(text, add_special=False)


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A server whose model echoes, and writes calls in this form."""
    with running(XmlTokenizer) as found:
        yield found


SAYS: dict[str, Any] = {"messages": [{"role": "user", "content": SAID}]}


@pytest.mark.parametrize("agent", ["", "mistral-client-python/3.7.0"])
def test_openai_and_mistral(server: Server, agent: str) -> None:
    body = {**SAYS, "tools": [{"type": "function", "function": FUNCTION}]}
    (choice,) = server.ask(CHAT, **body)["choices"]
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("f", ARGUMENTS)
    server.client.headers["user-agent"] = agent
    deltas = [chunk["choices"][0]["delta"] for chunk in server.stream(CHAT, **body)[:-1]]
    pieces = [piece["function"]["arguments"] for delta in deltas for piece in delta.get("tool_calls", ())]
    assert "".join(pieces) == call["function"]["arguments"]
    assert pieces == [pieces[0]] if agent else pieces[:5] == ["", '{"a": ', '" ', '\\"', "x"]  # a string as it comes


def test_responses(server: Server) -> None:
    body = {"input": SAID, "tools": [{"type": "function", **FUNCTION}]}
    (item, _) = server.ask(RESPOND, **body)["output"]
    assert (item["name"], json.loads(item["arguments"])) == ("f", ARGUMENTS)
    events = server.named_stream(RESPOND, **body)
    pieces = [each["delta"] for each in events if each["type"] == "response.function_call_arguments.delta"]
    assert "".join(pieces) == item["arguments"]
    assert pieces[:4] == ['{"a": ', '" ', '\\"', "x"]


def test_anthropic(server: Server) -> None:
    body = {**SAYS, "max_tokens": 99, "tools": [{"name": "f", "input_schema": SCHEMA}]}
    (block, _) = server.ask(MESSAGES, **body)["content"]
    assert (block["name"], block["input"]) == ("f", ARGUMENTS)
    deltas = [each["delta"] for each in server.named_stream(MESSAGES, **body) if each["type"] == "content_block_delta"]
    assert json.loads("".join(delta.get("partial_json", "") for delta in deltas)) == ARGUMENTS


def test_ollama(server: Server) -> None:
    body = {**SAYS, "tools": [{"type": "function", "function": FUNCTION}]}
    found = [line["message"] for line in lines(server, "/api/chat", **body)]
    for message in (server.ask("/api/chat", stream=False, **body)["message"], *found):
        assert [call["function"]["arguments"] for call in message.get("tool_calls", ())] in ([ARGUMENTS], [])
    assert sum("tool_calls" in message for message in found) == 1


def test_what_the_grammar_leaves_out_is_a_warning(server: Server) -> None:
    fields = {
        "a": {"type": "string", "pattern": "x"},
        "b": {"type": "array", "items": {"type": "string", "minLength": 1}},
    }
    function = {"name": "f", "parameters": {"properties": fields}}
    for more in ({"tool_choice": "required"}, {"tools": [{"function": {**function, "strict": True}}]}):
        answer = server.ask(CHAT, **{**SAYS, "tools": [{"function": function}], "max_tokens": 2, **more})
        told = "the schema of f: pattern: not enforced in this model's calls"
        assert answer["warnings"] == [{"param": "tools", "message": told}]
    assert "warnings" not in server.ask(CHAT, **SAYS, tools=[{"function": function}], max_tokens=2)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[openai.OpenAI]:
    """OpenAI's client of a server of a tiny random model with a template in this form."""
    folder = make_tiny_model("qwen3", tmp_path_factory.mktemp("xml"), max_position_embeddings=4096)
    settings = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": xml_template()}))
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--grpc-port", "0", "--http-port", "0"]
    command += ["--target", str(folder), "--kv-tokens", "4096", "--kv-disk-bytes", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            printed = "".join(process.stdout.readline() for _ in range(3))
            url = re.findall(r"HTTP +(http://[^/]+)", printed)[0]
            yield openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


FIELDS: dict[str, Any] = {
    "unit": {"enum": ["celsius", "kelvin"]},
    "days": {"type": "integer", "minimum": 1, "maximum": 9},
    "places": {"type": "array", "items": {"enum": ["Paris", "Rome"]}, "minItems": 1, "maxItems": 2},
    "exact": {"type": "boolean"},
}


def test_a_client_gets_valid_arguments_whole_and_streamed(client: openai.OpenAI) -> None:
    schema = {"type": "object", "properties": FIELDS, "required": [*FIELDS]}
    body: dict[str, Any] = {
        "model": "", "messages": [{"role": "user", "content": "hi"}], "tool_choice": "required", "max_tokens": 400,
        "tools": [{"type": "function", "function": {"name": "weather", "parameters": schema}}],
        "parallel_tool_calls": False, "seed": 1,
    }  # fmt: skip
    texts = set()
    for mode in ("auto", "off"):
        options = {**body, "extra_body": {"speculation": {"mode": mode}}}
        choice = client.chat.completions.create(**options).choices[0]
        (call,) = choice.message.tool_calls or []
        with client.chat.completions.stream(**options) as stream:
            pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
        assert choice.finish_reason == stream.get_final_completion().choices[0].finish_reason == "tool_calls"
        texts |= {call.function.arguments, "".join(pieces)}
    (text,) = texts  # the same tokens, whatever is drafted
    found = json.loads(text)
    assert list(found) == [*FIELDS]
    assert found["unit"] in ("celsius", "kelvin")
    assert 1 <= found["days"] <= 9
    assert {*found["places"]} <= {"Paris", "Rome"}
    assert isinstance(found["exact"], bool)
    answered = [*body["messages"], choice.message, {"role": "tool", "tool_call_id": call.id, "content": "Sunny."}]
    more = client.chat.completions.create(**body | {"messages": answered, "tool_choice": "none", "max_tokens": 2})
    assert more.usage is not None
    assert more.usage.completion_tokens == 2


def test_a_long_text_grows_in_the_client_until_it_is_cut_off(client: openai.OpenAI) -> None:
    write = {"name": "write", "parameters": {"properties": {"text": {"type": "string"}}, "required": ["text"]}}
    stream = client.chat.completions.create(
        model="", messages=[{"role": "user", "content": "hi"}], tools=[{"type": "function", "function": write}],
        tool_choice="required", max_tokens=64, stream=True, seed=1,
    )  # fmt: skip
    choices = [chunk.choices[0] for chunk in stream if chunk.choices]
    pieces = [call.function.arguments for choice in choices for call in choice.delta.tool_calls or () if call.function]
    assert "".join(map(str, pieces)).startswith('{"text": "')
    assert len(pieces) > 8
    assert choices[-1].finish_reason == "length"
