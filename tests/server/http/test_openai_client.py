"""OpenAI's own Python client against a real server and a real model, compared with gRPC token by token."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import grpc
import openai
import pytest

from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc
from specdec.api.v1 import options_pb2 as options

pytestmark = pytest.mark.model
PROMPT = "red green blue black white\n" * 4 + "red"
QUESTION = [{"role": "user", "content": "Name three colours."}]
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "seed": 1234}
TOKENS = 24


class Real:
    """A running `specdec serve`, by both its faces."""

    def __init__(self, grpc_address: str, url: str) -> None:
        self.url = url
        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        self._generation = generation_pb2_grpc.GenerationServiceStub(grpc.insecure_channel(grpc_address))

    def over_grpc(self, **prompt: Any) -> pb.Sample:
        """Return gRPC's answer."""
        request = pb.GenerateRequest(
            sampling=options.SamplingOptions(**SAMPLING),
            stopping=options.StoppingOptions(max_tokens=TOKENS),
            output=options.OutputOptions(logprobs=2),
            **prompt,
        )
        (sample,) = self._generation.Generate(request).samples
        return sample


@pytest.fixture(scope="module")
def real() -> Iterator[Real]:
    """A server of SmolLM2."""
    command = [sys.executable, "-m", "specdec.cli.main", "serve", "--grpc-port", "0", "--http-port", "0"]
    command += ["--kv-tokens", "2048", "--kv-disk-bytes", "0", "--quiet"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            reply = "".join(process.stdout.readline() for _ in range(3))
            yield Real(re.findall(r"gRPC +(\S+)", reply)[0], re.findall(r"HTTP +(http://[^/]+)", reply)[0])
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=30) == 0


def test_completions_equal_those_of_grpc(real: Real) -> None:
    wanted = real.over_grpc(text=PROMPT)
    assert len(wanted.token_ids) == TOKENS
    fields: dict[str, Any] = {
        "model": "smollm2-135m",
        "prompt": PROMPT,
        "max_tokens": TOKENS,
        "logprobs": 2,
        **SAMPLING,
    }
    extra = {"return_token_ids": True}
    for mode in ("on", "off"):
        body = {**extra, "speculation": {"mode": mode}}
        whole = real.client.completions.create(**fields, extra_body=body)
        (choice,) = whole.choices
        assert (choice.text, choice.model_extra["token_ids"]) == (wanted.text, list(wanted.token_ids))
        assert choice.finish_reason == "length"
        assert whole.usage is not None
        assert (whole.usage.completion_tokens, whole.usage.total_tokens) == (TOKENS, whole.usage.prompt_tokens + TOKENS)
        stats = whole.model_extra["metrics"]["speculative_decoding"]
        assert (stats["num_draft_tokens"] == 0) == (mode == "off")
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs == [row.logprob for row in wanted.logprobs]
        assert "".join(choice.logprobs.tokens or []) == wanted.text
        text, ids, usage = "", [], None
        stream = real.client.completions.create(
            **fields, extra_body=body, stream=True, stream_options={"include_usage": True}
        )
        for chunk in stream:
            usage = chunk.usage
            for part in chunk.choices:
                text += part.text
                ids += part.model_extra.get("token_ids") or []
        assert (text, ids) == (wanted.text, list(wanted.token_ids))
        assert usage is not None
        assert usage.completion_tokens == TOKENS


def test_chats_equal_those_of_grpc(real: Real) -> None:
    messages = [options.ChatMessage(**message) for message in QUESTION]
    wanted = real.over_grpc(chat=options.ChatPrompt(messages=messages))
    fields: dict[str, Any] = {
        "model": "", "messages": QUESTION, "max_completion_tokens": TOKENS, "logprobs": True, "top_logprobs": 2,
        **SAMPLING, "extra_body": {"return_token_ids": True},
    }  # fmt: skip
    whole = real.client.chat.completions.create(**fields)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert (choice.message.content, choice.model_extra["token_ids"]) == (wanted.text, list(wanted.token_ids))
    assert choice.logprobs is not None
    assert [row.logprob for row in choice.logprobs.content or []] == [row.logprob for row in wanted.logprobs]
    text, roles, ends = "", [], []
    for chunk in real.client.chat.completions.create(**fields, stream=True):
        (part,) = chunk.choices
        text += part.delta.content or ""
        roles += [part.delta.role] if part.delta.role else []
        ends += [part.finish_reason] if part.finish_reason else []
    assert (text, roles, ends) == (wanted.text, ["assistant"], [choice.finish_reason])


TOOL = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "parameters": {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}}, "required": ["unit"]},
    },
}


def test_a_tool_call_is_generated_with_drafts(real: Real) -> None:
    fields: dict[str, Any] = {
        "model": "", "messages": QUESTION, "tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False,
        "seed": 1, "extra_body": {"speculation": {"mode": "on", "drafters": ["grammar"]}},
    }  # fmt: skip
    whole = real.client.chat.completions.create(**fields)
    (choice,) = whole.choices
    (call,) = choice.message.tool_calls or []
    assert (choice.finish_reason, choice.message.content, call.function.name) == ("tool_calls", None, "get_weather")
    assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")
    stats = whole.model_extra["metrics"]["speculative_decoding"]
    assert stats["num_accepted_draft_tokens"] > 0.5 * whole.usage.completion_tokens  # type: ignore[union-attr]
    with real.client.chat.completions.stream(**fields) as stream:
        pieces = [e.arguments_delta for e in stream if e.type == "tool_calls.function.arguments.delta"]
    streamed = stream.get_final_completion().choices[0]
    (again,) = streamed.message.tool_calls or []
    assert (again.function.name, again.function.arguments) == (call.function.name, call.function.arguments)
    assert "".join(pieces) == call.function.arguments
    answered = [
        *QUESTION, streamed.message.to_dict(), {"role": "tool", "tool_call_id": again.id, "content": "20 degrees"},
    ]  # fmt: skip
    reply = real.client.chat.completions.create(
        **fields | {"messages": answered, "tool_choice": "none", "max_tokens": 8}
    )
    assert reply.choices[0].message.content
    named = {"type": "function", "function": {"name": "get_wether"}}
    with pytest.raises(openai.BadRequestError, match="get_wether"):
        real.client.chat.completions.create(**fields | {"tool_choice": named})
    bad = {"type": "object", "properties": {"unit": {"type": "unknown"}}}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": bad}}]
    with pytest.raises(openai.BadRequestError) as refused:
        real.client.chat.completions.create(**fields | {"tools": tools})
    assert refused.value.param == "tools"


def test_grammars_stops_and_several_samples(real: Real) -> None:
    colour = {"colour": {"enum": ["red", "blue"]}}
    schema = {"type": "object", "properties": colour, "required": ["colour"], "additionalProperties": False}
    answer = real.client.chat.completions.create(
        model="smollm2-135m", messages=QUESTION, n=2, max_tokens=40, seed=3,  # type: ignore[arg-type]
        response_format={"type": "json_schema", "json_schema": {"name": "c", "strict": True, "schema": schema}},
    )  # fmt: skip
    for choice in answer.choices:
        assert json.loads(choice.message.content or "") in ({"colour": "red"}, {"colour": "blue"})
        assert choice.finish_reason == "stop"
    stopped = real.client.completions.create(
        model="smollm2-135m", prompt=[PROMPT, PROMPT], stop=["black"], temperature=0, max_tokens=20
    )
    assert [(c.index, c.text, c.finish_reason) for c in stopped.choices] == [
        (i, " green blue ", "stop") for i in range(2)
    ]
    predicted = real.client.completions.create(
        model="smollm2-135m", prompt=PROMPT, temperature=0, max_tokens=20,
        extra_body={
            "prediction": {"type": "content", "content": " green blue black white\nred green"},
            "speculation": {"mode": "on"},  # on a busy machine `auto` may find that drafts do not pay
        },
    )  # fmt: skip
    assert predicted.usage is not None
    assert predicted.usage.completion_tokens_details is not None
    assert (predicted.usage.completion_tokens_details.accepted_prediction_tokens or 0) > 0


def test_a_next_edit_prompt_gets_the_same_answer_in_fewer_steps(real: Real) -> None:
    old = "".join(f"total_{i} = price_{i} * count_{i}\n" for i in range(6))
    window = old.replace("total_0", "sum_0")
    prompt = f"<|file_sep|>original/a.py\n{old}\n<|file_sep|>current/a.py\n{window}\n<|file_sep|>updated/a.py\n"
    plain, drafted = (
        real.client.completions.create(
            model="smollm2-135m", prompt=prompt, temperature=0, max_tokens=48,
            extra_body={"speculation": {"mode": mode, "drafters": ["prediction"]}},
        )
        for mode in ("off", "on")
    )  # fmt: skip
    assert plain.choices[0].text == drafted.choices[0].text
    assert drafted.usage is not None
    details = drafted.usage.completion_tokens_details
    assert details is not None
    assert details.accepted_prediction_tokens
    steps = [answer.model_extra["metrics"]["speculative_decoding"]["num_steps"] for answer in (plain, drafted)]  # type: ignore[index]
    assert 2 * steps[1] < steps[0]


def test_the_client_raises_its_own_errors(real: Real) -> None:
    with pytest.raises(openai.NotFoundError) as missing:
        real.client.completions.create(model="gpt-5", prompt="a")
    assert (missing.value.param, missing.value.code) == ("model", "model_not_found")
    with pytest.raises(openai.BadRequestError) as bad:
        real.client.completions.create(model="smollm2-135m", prompt="a", temperature=-1, n=99)
    assert {e["param"] for e in bad.value.body["errors"]} == {"temperature", "n"}  # type: ignore[index]
    with pytest.raises(openai.BadRequestError) as grammar:
        real.client.completions.create(model="smollm2-135m", prompt="a", extra_body={"guided_regex": "("}, stream=True)
    assert grammar.value.param == "guided_regex"
    assert [model.id for model in real.client.models.list()] == ["smollm2-135m"]
    assert real.client.models.retrieve("smollm2-135m").model_extra["max_model_len"] > 0


def test_streams_contain_the_tree_of_each_step(real: Real) -> None:
    fields: dict[str, Any] = {"model": "", "prompt": "one two one two one two", "max_tokens": 24, "temperature": 0}
    plain = real.client.completions.create(**fields).choices[0].text
    extra = {"return_step_trees": True, "return_token_ids": True, "speculation": {"mode": "on"}}
    text, drafted = "", ""
    for chunk in real.client.completions.create(**fields, stream=True, extra_body=extra):
        for part in chunk.choices:
            text += part.text
            tree = (part.model_extra or {}).get("step_tree")
            if tree is None:
                assert not part.model_extra.get("token_ids")  # a beginning, or an end
                continue
            reply = [tree["nodes"][node] for node in tree["accepted"]]
            assert [node["token_id"] for node in reply] == part.model_extra["token_ids"][: len(reply)]
            assert all(node["sources"] and 0 <= node["chance"] <= 1 for node in tree["nodes"][1:])
            drafted += "".join(node["text"] for node in reply)
    assert text == plain
    assert 0 < len(drafted) < len(text)
    with pytest.raises(openai.BadRequestError, match="return_step_trees"):
        real.client.completions.create(**fields, extra_body=extra)
