"""llama.cpp's fields, and their effects."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from typing import Any

import httpx
import pytest
from starlette.testclient import TestClient

from server.http.answering import Sample
from server.http.app import build_app
from server.http.call import Call
from server.http.llamacpp import LLAMACPP
from server.http.llamacpp_completions import LlamaAnswer, parse_completion, parse_infill, picked, timings
from specdec.core.types import (
    EngineLoad,
    Finished,
    FinishReason,
    GrammarKind,
    SpeculationMode,
    SpeculationStats,
    TextRules,
    Timings,
    Usage,
)
from tests.fake_engine import DEFAULT_SEED
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.calls import asked, code_context, make_context, violations
from tests.server.http.harness import Server, running

GAP = {"input_prefix": "a\n", "input_suffix": "\nz", "prompt": "  b"}


def completion(**body: Any) -> LlamaAnswer:
    return asked(parse_completion, {"prompt": "hi"} | body)


def infill(**body: Any) -> LlamaAnswer:
    return asked(parse_infill, GAP | body, server=code_context())


def shown(ask: LlamaAnswer) -> str:
    """The prompt as text."""
    return CodeTokenizer().shown(ask.request.prompt_ids) + ask.request.healing_prefix


def test_defaults_are_llama_cpps() -> None:
    sampling = completion().request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) == (0.8, 40, 0.95, 0.05)
    assert (sampling.n, sampling.seed, sampling.repetition_penalty) == (1, None, 1.0)
    assert completion().request.stopping.max_tokens is None
    assert completion(n_predict=-1).request.stopping.max_tokens is None
    assert completion(n_predict=0).request.stopping.max_tokens == 0
    given = completion(
        temperature=0.5, top_k=7, top_p=0.5, min_p=0.1, seed=9, repeat_penalty=1.5, presence_penalty=0.25,
        frequency_penalty=-0.5, n_cmpl=3,
    ).request.sampling  # fmt: skip
    assert (given.temperature, given.top_k, given.top_p, given.min_p, given.seed) == (0.5, 7, 0.5, 0.1, 9)
    assert (given.repetition_penalty, given.presence_penalty, given.frequency_penalty, given.n) == (1.5, 0.25, -0.5, 3)


@pytest.mark.parametrize(
    ("samplers", "n", "wanted"),
    [
        (["top_k", "top_p", "infill"], 1, (0.0, 40, 0.95, 0.0)), (["top_k", "infill"], 2, (1.0, 40, 1.0, 0.0)),
        ([], 1, (1.0, 0, 1.0, 0.0)), (["temperature", "min_p"], 1, (0.8, 0, 1.0, 0.05)),
        ("kpt", 1, (0.8, 40, 0.95, 0.05)),
    ],
)  # fmt: skip
def test_only_the_named_samplers_are_enabled(samplers: Any, n: int, wanted: tuple[float, ...]) -> None:
    s = completion(samplers=samplers, n_cmpl=n).request.sampling
    assert (s.temperature, s.top_k, s.top_p, s.min_p) == wanted
    assert completion(samplers=samplers, n_cmpl=n, temperature=0.3).request.sampling.temperature == 0.3


def test_an_objective_of_time() -> None:
    assert infill(t_max_prompt_ms=1).request.omitted is None
    server = code_context()
    engine: Any = server.models.first.client.engine
    engine.load = EngineLoad(prompt_ms=(40.0, 52.0, 100.0))
    long = GAP | {"input_prefix": "a = 1\n" * 500}
    request = asked(parse_infill, long | {"ttft_ms": 400}, server=server).request
    assert len(request.prompt_ids) < len(asked(parse_infill, long, server=server).request.prompt_ids)
    assert request.omitted is not None
    assert request.omitted[0] > 400
    assert [v.field for v in violations(parse_infill, GAP | {"ttft_ms": 0})] == ["ttft_ms"]


def test_stop_conditions() -> None:
    stopping = infill(n_indent=4, t_max_predict_ms=250, t_max_prompt_ms=1, stop=["x"], n_predict=9).request.stopping
    assert stopping.rules is not None
    assert (stopping.rules.min_indent, stopping.decode_limit_s, stopping.finish_line) == (4, 0.25, True)
    assert (stopping.time_limit_s, stopping.stop) == (None, ("x",))
    assert stopping.max_tokens == 9 + len(infill().request.healing_prefix)
    assert CodeTokenizer().names["<|file_sep|>"] in stopping.stop_token_ids
    unlimited = completion(t_max_predict_ms=0, n_indent=0).request.stopping
    assert (unlimited.decode_limit_s, unlimited.finish_line, unlimited.rules) == (None, False, None)
    assert completion(n_indent=2).request.stopping.rules == TextRules(min_indent=2)
    rules = infill().request.stopping.rules
    assert rules is not None
    assert (rules.min_indent, rules.suffix) == (None, "\nz")  # the client requests the indentation itself


def test_infill_with_extra_context() -> None:
    assert shown(infill()) == "<|fim_prefix|><|fim_suffix|>\nz<|fim_middle|>a\n  b"
    extra = [{"text": "old", "filename": "o.py", "time": 1}, {"text": "new", "filename": "n.py", "time": 2}]
    text = shown(infill(input_extra=extra))
    assert text.startswith("<|repo_name|>myproject\n<|file_sep|>")
    for part in ("<|file_sep|>o.py\nold\n", "<|file_sep|>n.py\nnew\n", "<|file_sep|>filename\n<|fim_prefix|>"):
        assert part in text
    assert text == shown(infill(input_extra=extra[::-1]))  # one prompt, whatever the order of its parts
    assert infill(input_extra=[e | {"time": [1763, 5]} for e in extra]).request.prompt_ids  # Vim's reltime()
    for time in ("now", True, None, {}, 1e300, -1, [[]]):
        assert shown(infill(input_extra=[extra[0] | {"time": time}])) == shown(infill(input_extra=extra[:1]))
    injected = infill(prompt="<|fim_suffix|>").request.prompt_ids
    assert injected.count(CodeTokenizer().names["<|fim_suffix|>"]) == 1


def test_other_infill_fields() -> None:
    ask = completion(
        speculation={"mode": "off", "width": 2}, session="s", priority=-3, response_fields=["content"], stream=True,
        grammar='root ::= "a"', id_slot=4, cache_prompt=True, whatever=[1],
    )  # fmt: skip
    request = ask.request
    assert (request.speculation.mode, request.speculation.width) == (SpeculationMode.OFF, 2)
    assert (request.session, request.priority, ask._paths, ask.stream) == ("s", -3, ("content",), True)
    for limit, depth in ((-1, 0), (0, 0), (16, 16), (1000, 63)):
        assert completion(**{"speculative.n_max": limit}).request.speculation.max_depth == depth
    assert request.grammar is not None
    assert request.grammar.kind is GrammarKind.EBNF
    schema = completion(json_schema={"type": "object", "properties": {}}).request.grammar
    assert schema is not None
    assert schema.kind is GrammarKind.JSON_SCHEMA
    assert json.loads(schema.text) == {"type": "object", "properties": {}, "additionalProperties": False}
    assert completion(prompt="a!").request.prompt_ids == (BOS, ord("a"), 255)
    assert completion(prompt=[5, "b", 6]).request.prompt_ids == (5, ord("b"), 6)


@pytest.mark.parametrize(
    ("reader", "field", "body"),
    [
        (parse_completion, "prompt", {}), (parse_completion, "prompt", {"prompt": []}),
        (parse_completion, "prompt", {"prompt": ["a", "b"]}), (parse_completion, "prompt", {"prompt": [1.5]}),
        (parse_completion, "n_cmpl", {"prompt": "a", "n_cmpl": 0}),
        (parse_completion, "n_cmpl", {"prompt": "a", "n_cmpl": True}),
        (parse_completion, "json_schema", {"prompt": "a", "json_schema": {}, "grammar": "x"}),
        (parse_completion, "json_schema", {"prompt": "a", "json_schema": 5}),
        (parse_completion, "speculation.mode", {"prompt": "a", "speculation": {"mode": "fast"}}),
        (parse_completion, "speculative.n_max", {"prompt": "a", "speculative.n_max": "few"}),
        (parse_infill, "input_prefix", {"input_suffix": ""}), (parse_infill, "input_suffix", {"input_prefix": ""}),
        (parse_infill, "input_extra[1].text", {"input_extra": [{"text": ""}, {"text": 5}]}),
        (parse_infill, "input_extra[0].text", {"input_extra": [{}]}),
        (parse_infill, "n_predict", {"n_predict": "many"}),
    ],
)  # fmt: skip
def test_invalid_fields_are_named(reader: Callable[[Call], Awaitable[Any]], field: str, body: dict[str, Any]) -> None:
    assert field in [violation.field for violation in violations(reader, body)]


def end(reason: FinishReason, stop: str | int | None = None, **usage: int) -> Finished:
    return Finished("r", 0, reason, stop, Usage(**usage), SpeculationStats(5, 3, 6, 2), Timings(1, 20.0, 50.0))


def answered(end: Finished) -> dict[str, Any]:
    """The answer of a sample that ends with ``end``."""
    sample = Sample(0, 0, "t", [1])
    sample.end = end
    found: dict[str, Any] = completion().whole([sample])
    return found


def test_stop_types() -> None:
    for reason, stop, wanted in (
        (FinishReason.EOS, 2, ("eos", "")), (FinishReason.LENGTH, None, ("limit", "")),
        (FinishReason.TIME_LIMIT, None, ("limit", "")), (FinishReason.INDENT, None, ("limit", "")),
        (FinishReason.STOP_STRING, "x", ("word", "x")), (FinishReason.STOP_TOKEN, 7, ("word", "")),
        (FinishReason.SUFFIX, None, ("eos", "")), (FinishReason.ABORTED, None, ("none", "")),
    ):  # fmt: skip
        found = answered(end(reason, stop))
        assert (found["stop_type"], found["stopping_word"]) == wanted


def test_timings() -> None:
    finished = end(FinishReason.EOS, prompt_tokens=30, cached_tokens=10, output_tokens=5)
    assert timings(finished) == {
        "cache_n": 10, "prompt_n": 20, "prompt_ms": 20.0, "prompt_per_token_ms": 1.0, "prompt_per_second": 1000.0,
        "predicted_n": 5, "predicted_ms": 50.0, "predicted_per_token_ms": 10.0, "predicted_per_second": 100.0,
        "draft_n": 6, "draft_n_accepted": 2,
    }  # fmt: skip
    assert answered(finished)["tokens_cached"] == 35
    nothing = timings(Finished("r", 0, FinishReason.LENGTH, None, Usage(), SpeculationStats(), Timings()))
    assert all(value == 0 for value in nothing.values())
    assert picked({"a": {"b": 1, "c": {"d": 2}}, "e": 3}, ("a/b", "e", "a/c/d", "x", "e/f", "", "a")) == {
        "a/b": 1, "e": 3, "a/c/d": 2, "a": {"b": 1, "c": {"d": 2}},
    }  # fmt: skip


@pytest.fixture(scope="module")
def fake() -> Any:
    """A server over the engine that echoes."""
    with running(FakeTokenizer) as found:
        yield found


def test_several_samples_are_a_list(fake: Server) -> None:
    answer: Any = fake.ask("/completion", prompt="abc", n_predict=3, n_cmpl=2, return_tokens=True)
    assert [(one["index"], one["content"]) for one in answer] == [(0, "\x02ab"), (1, "abc")]
    assert answer[1]["tokens"] == list(b"abc")
    single = fake.ask("/completion", prompt="abc", n_predict=2, id_slot=3)
    assert (single["content"], single["tokens"], single["has_new_line"]) == ("\x02a", [], False)
    assert single["id_slot"] == 0  # all prompts share one cache
    streamed = fake.stream("/completion", prompt="abc", n_predict=2, n_cmpl=2, return_tokens=True)
    for index in (0, 1):
        mine = [event for event in streamed if event["index"] == index]
        assert [event["stop"] for event in mine] == [False, False, True]
        assert "".join(event["content"] for event in mine) == ("\x02a", "ab")[index]
        assert [event["tokens_predicted"] for event in mine] == [1, 2, 2]


def test_the_end_of_a_stream_tells_of_an_earlier_line_break(fake: Server) -> None:
    for prompt, has_one in (("a\nb", True), ("abc", False)):
        *_, last = fake.stream("/completion", prompt=prompt, n_predict=4)
        assert (last["stop"], last["content"], last["has_new_line"]) == (True, "", has_one)


def test_the_seed_that_was_drawn_is_returned(fake: Server) -> None:
    whole: Any = fake.ask("/completion", prompt="abc", n_predict=2)
    *_, last = fake.stream("/completion", prompt="abc", n_predict=2)
    seeded = fake.ask("/completion", prompt="abc", n_predict=2, seed=7, response_fields=["generation_settings/seed"])
    assert whole["generation_settings"]["seed"] == last["generation_settings"]["seed"] == DEFAULT_SEED
    assert seeded == {"generation_settings/seed": 7}


def test_a_disconnect_cancels_the_request(fake: Server) -> None:
    aborts = fake.load.prefix_hit_tokens
    slow = {"prompt": "x" * 100, "n_predict": 100, "cache_salt": "slow"}
    with httpx.Client(timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
        client.post(f"{fake.url}/completion", json=slow)
    with fake.client.stream("POST", "/completion", json=slow | {"stream": True}) as response:
        next(response.iter_raw())
    assert fake.idle(aborts + 2)


def test_errors_have_llamacpps_shape(fake: Server) -> None:
    status, error = fake.refused("/completion", prompt="a", cache_salt="full")
    assert (status, error["code"], error["type"]) == (429, 429, "rate_limit_error")
    *_, last = fake.stream("/completion", prompt="a", cache_salt="broken")
    assert last["error"]["code"] == 500
    assert fake.refused("/completion", prompt="a", model="other")[0] == 404


def test_tokenize_and_detokenize(fake: Server) -> None:
    assert fake.ask("/tokenize", content="a!") == {"tokens": [97, 255]}
    assert fake.ask("/tokenize", content="a!", add_special=True, parse_special=False) == {"tokens": [BOS, 97, 33]}
    assert fake.ask("/tokenize", content="a!", with_pieces=True) == {
        "tokens": [{"id": 97, "piece": "a"}, {"id": 255, "piece": [255]}]
    }
    assert fake.ask("/detokenize", tokens=[97, BOS])["content"] == "a\x02"
    for path, body in (("/tokenize", {}), ("/tokenize", {"content": 5}), ("/detokenize", {"tokens": [256]})):
        assert fake.refused(path, **body)[0] == 400


def test_apply_template() -> None:
    talk = [{"role": "user", "content": "hi"}]
    with running(lambda: FakeTokenizer(has_tools=True)) as fake:
        assert fake.ask("/apply-template", messages=talk) == {"prompt": "user:hi;"}
        tools = [{"type": "function", "function": {"name": "look"}}]
        assert fake.ask("/apply-template", messages=talk, tools=tools) == {"prompt": "[look]user:hi;"}
        begun = [{"role": chr(BOS) + "user", "content": "hi"}]  # of a template that writes the begin token
        assert fake.ask("/apply-template", messages=begun) == {"prompt": "user:hi;"}
        assert fake.refused("/apply-template", messages=[])[0] == 400


def test_slots() -> None:
    server: Any = make_context()
    with TestClient(build_app(server, LLAMACPP), base_url="http://127.0.0.1") as client:

        def slots(running: int, **query: str) -> httpx.Response:
            server.models.first.client.engine.load = EngineLoad(running_requests=running)
            return client.get("/slots", params=query)

        n = server.models.first.info.max_batch
        found = slots(2).json()
        assert [slot["id"] for slot in found] == list(range(n))
        assert [slot["is_processing"] for slot in found] == [True, True] + [False] * (n - 2)
        assert {slot["n_ctx"] for slot in found} == {server.models.first.info.max_context}
        assert [slots(busy, fail_on_no_slot="1").status_code for busy in (0, n - 1, n)] == [200, 200, 503]
        assert slots(n).status_code == 200
