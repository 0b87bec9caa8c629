"""The tools of a request become a grammar, a parser and errors that name the field."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from server.http import tool_use
from server.http.ollama import parse_chat as parse_ollama
from server.http.openai_chat import parse_chat
from server.json_body import Body, RequestFields
from server.json_schemas import closed
from specdec.core.types import Delta, Finished, FinishReason, GrammarKind, SpeculationStats, Started, Timings, Usage
from specdec.errors import ViolationCollector
from specdec.models.tool_forms import ToolForm
from tests.grammar.helpers import start
from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.calls import asked, make_context, violations
from tests.server.http.harness import Server

HI = [{"role": "user", "content": "hi"}]
PLACE = {"type": "object", "properties": {"at": {"type": "integer"}}, "required": ["at"]}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": PLACE}}, {"function": {"name": "find"}}]
BODY: dict[str, Any] = {"messages": HI, "tools": TOOLS}


def named(name: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name}}


@pytest.mark.parametrize("parse", [parse_chat, parse_ollama])
def test_tool_choice_becomes_a_grammar(parse: Any) -> None:
    free = asked(parse, BODY)
    assert (free.request.grammar, free.form.tools.required, free.form.tools.parallel) == (None, (), True)
    for choice in ("required", "any"):
        ask = asked(parse, BODY | {"tool_choice": choice})
        assert (ask.form.tools.required, ask.form.tools.parallel) == (("look", "find"), True)
        assert ask.request.grammar.kind is GrammarKind.EBNF
        assert "look" in ask.request.grammar.text
        assert "find" in ask.request.grammar.text
    for choice in (named("find"), {"function": {"name": "find"}}):  # the latter is huggingface_hub's
        ask = asked(parse, BODY | {"tool_choice": choice})
        assert (ask.form.tools.required, ask.form.tools.parallel) == (("find",), False)
        assert "look" not in ask.request.grammar.text
    assert not asked(parse, BODY | {"parallel_tool_calls": False}).form.tools.parallel


def allowed(mode: Any, *names: Any) -> dict[str, Any]:
    return {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": [*map(named, names)]}}


@pytest.mark.parametrize("parse", [parse_chat, parse_ollama])
def test_allowed_tools_are_the_only_ones(parse: Any) -> None:
    free = asked(parse, BODY | {"tool_choice": allowed("auto", "find")})
    assert (
        [tool["function"]["name"] for tool in free.form.tools.tools],
        free.form.tools.required,
        free.request.grammar,
    ) == (
        ["find"],
        (),
        None,
    )
    forced = asked(parse, BODY | {"tool_choice": allowed("required", "find", "look")})
    assert (forced.form.tools.required, forced.form.tools.parallel) == (("find", "look"), True)
    assert "find" in forced.request.grammar.text


class MistralTokenizer(FakeTokenizer):
    """A tokenizer whose call markers are special tokens."""

    def special_id(self, name: str) -> int | None:
        return BOS if name == "[TOOL_CALLS]" else None


def test_special_token_markers_are_shown_and_matched_by_id() -> None:
    server = make_context(MistralTokenizer(tool_form=ToolForm.MISTRAL_ARGS))
    for parse in (parse_chat, parse_ollama):
        assert not asked(parse, BODY, server=server).request.output.skip_special_tokens
        assert asked(parse, BODY | {"tool_choice": "none"}, server=server).request.output.skip_special_tokens
        assert asked(parse, BODY).request.output.skip_special_tokens
    forced = asked(parse_chat, BODY | {"tool_choice": "required"}, server=server).request.grammar
    assert forced is not None
    assert forced.text.startswith(f"start: <[{BOS}]> call")


NO_SCHEMA = {"properties": 5}
BAD = [
    ("tools[1].function.name", {"tools": [TOOLS[0], TOOLS[0]]}),
    ("tools[0].function.name", {"tools": [{"function": {"name": "a b"}}]}),
    ("tools[0].function.name", {"tools": [{"function": {"name": "a" * 257}}]}),
    ("tools[0].function.parameters", {"tools": [{"function": {"name": "a", "parameters": []}}]}),
    ("tools[0].function.parameters.type", {"tools": [{"function": {"name": "a", "parameters": {"type": "array"}}}]}),
    ("tools[0].function.parameters.properties", {"tools": [{"function": {"name": "a", "parameters": NO_SCHEMA}}]}),
    ("tools[0].function.strict", {"tools": [{"function": {"name": "a", "strict": "yes"}}]}),
    ("tool_choice.function.name", {"tool_choice": named("other")}),
    ("tool_choice.function.name", {"tool_choice": named(5)}),
    ("tool_choice", {"tool_choice": {"type": "tool", "name": "look"}}),
    ("tool_choice", {"tool_choice": "sometimes"}),
    ("tool_choice.allowed_tools.mode", {"tool_choice": allowed("none", "find")}),
    ("tool_choice.allowed_tools.tools", {"tool_choice": allowed("auto")}),
    ("tool_choice.allowed_tools.tools[0].function.name", {"tool_choice": allowed("auto", "other")}),
    ("tool_choice", {"tool_choice": 5}),
    ("tool_choice", {"tools": [], "tool_choice": "required"}),
    ("parallel_tool_calls", {"parallel_tool_calls": 1}),
]  # fmt: skip


@pytest.mark.parametrize(("field", "fields"), BAD)
def test_invalid_fields_are_named(field: str, fields: dict[str, Any]) -> None:
    for parse in (parse_chat, parse_ollama):
        assert field in [v.field for v in violations(parse, BODY | fields)]


def test_a_response_format_leaves_calls_possible() -> None:
    for parse, form in (
        (parse_chat, {"response_format": {"type": "json_object"}}),
        (parse_chat, {"guided_json": json.dumps(PLACE)}),
        (parse_ollama, {"format": PLACE}),
    ):
        grammar = asked(parse, BODY | form).request.grammar
        assert grammar.kind is GrammarKind.EBNF
        assert 'start: "<tool_call>" calls | answer | bare' in grammar.text
        assert asked(parse, BODY | form | {"tool_choice": "none"}).request.grammar.kind in (
            GrammarKind.JSON_OBJECT,
            GrammarKind.JSON_SCHEMA,
        )


class FarSighted(FakeTokenizer):
    """A tokenizer to which any conversation is one token."""

    longest_token = 1 << 20

    def encode_chat(self, *_: Any, **__: Any) -> list[int]:
        return [5]


@pytest.mark.parametrize("form", [ToolForm.HERMES, ToolForm.QWEN_XML])
def test_agents_may_have_many_tools(form: ToolForm) -> None:
    server = make_context(FarSighted(tool_form=form))
    told = {"type": "string", "description": "What this field holds, as usual tools tell it. " * 8}
    fields = {f"field_{i}": told for i in range(6)}
    function = {"strict": True, "parameters": {"type": "object", "properties": fields, "required": [*fields]}}
    tools = [{"type": "function", "function": {"name": f"tool_{i}", **function}} for i in range(32)]
    schema = {"type": "json_schema", "json_schema": {"name": "answer", "schema": {"type": "object", "properties": {
        f"part_{i}": told | {"description": told["description"] * 16} for i in range(8)
    }}}}  # fmt: skip
    for more in (
        {}, {"tool_choice": "required"}, {"response_format": {"type": "json_object"}}, {"response_format": schema},
    ):  # fmt: skip
        grammar = asked(parse_chat, {"messages": HI, "tools": tools, **more}, server=server).request.grammar
        assert (16 << 10 if form is ToolForm.HERMES else 0) < len(grammar.text) < 48 << 10
        start(grammar)


@pytest.mark.parametrize("levels", [65, 480])
def test_an_answers_schema_that_is_nested_too_deep_is_named(levels: int) -> None:
    deep = '{"properties":{"a":' * levels + "{}" + "}}" * levels
    found = violations(parse_chat, BODY | {"guided_json": deep})
    assert [v.field for v in found] == ["guided_json"]


@pytest.mark.parametrize("as_text", [True, False])
def test_bug_an_answers_schema_that_is_far_too_long_is_not_read(as_text: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a text it counts as one value of the body, whatever it holds."""
    read = list[dict[str, Any]]()

    def keep(schema: dict[str, Any]) -> dict[str, Any]:
        read.append(schema)
        return schema

    monkeypatch.setattr(tool_use, "without_notes", keep)
    schema = {"type": "object", "properties": {f"field_{i}": {"type": "integer"} for i in range(6000)}}
    found = violations(parse_chat, BODY | {"guided_json": json.dumps(schema) if as_text else schema})
    assert [v.description for v in found] == ["must not exceed 65536 bytes; simplify it"]
    assert all(len(schema.get("properties", ())) <= 1 for schema in read)  # those of the tools


def test_forms_that_are_no_json_prevent_calls_with_a_warning(server: Server) -> None:
    body = BODY | {"max_tokens": 2, "guided_choice": ["a"]}
    assert [note["param"] for note in server.ask("/v1/chat/completions", **body)["warnings"]] == ["tools"]


SET = {"type": "object", "properties": {"ids": {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}}}


def test_what_no_grammar_enforces_is_a_warning(server: Server) -> None:
    def warnings(**fields: Any) -> list[tuple[str, str]]:
        answer = server.ask("/v1/chat/completions", messages=HI, max_tokens=2, **fields)
        return [(note["param"], note["message"]) for note in answer.get("warnings", ())]

    message = "uniqueItems: not enforced, because no grammar expresses it"
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": SET}}
    assert warnings(response_format=form) == [("response_format.json_schema.schema", message)]
    pick: dict[str, Any] = {"name": "pick", "parameters": SET}
    told = [("tools", f"the schema of pick: {message}")]
    assert not warnings(tools=[{"function": pick}])  # nothing is enforced
    assert warnings(tools=[{"function": pick}], tool_choice="required") == told
    assert warnings(tools=[{"function": {**pick, "strict": True}}]) == told


@pytest.mark.parametrize("choice", ["required", named("find")])
def test_forced_calls_prevail_over_a_form_with_a_warning(server: Server, choice: Any) -> None:
    plain = asked(parse_chat, BODY | {"tool_choice": choice}).request.grammar
    for parse, path, form in (
        (parse_chat, "/v1/chat/completions", {"response_format": {"type": "json_object"}}),
        (parse_chat, "/v1/chat/completions", {"guided_choice": ["a"]}),
        (parse_ollama, "/api/chat", {"format": PLACE, "stream": False}),
    ):
        body = BODY | form | {"tool_choice": choice}
        assert asked(parse, body).request.grammar == plain
        assert [note["param"] for note in server.ask(path, **body)["warnings"]] == [next(iter(form))]


def stream(form: ToolForm, pieces: list[str], agent: str = "", **fields: Any) -> list[dict[str, Any]]:
    """The choices of the chunks of an answer of ``pieces``, which the model itself ended."""
    server = make_context(FakeTokenizer(tool_form=form))
    writer = asked(parse_chat, BODY | {"stream": True} | fields, {"user-agent": agent}, server=server)
    events = [Started("r", 1, 3, 0, 0.0), *(Delta("r", 0, [1], piece) for piece in pieces)]
    end = Finished("r", 0, FinishReason.EOS, None, Usage(), SpeculationStats(), Timings())
    data = b"".join(writer.take(event) for event in (*events, end)) + writer.last()
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n")[:-2]]
    return [json.loads(line)["choices"][0] for line in lines]


def test_golden_transcripts() -> None:
    """The chunks of OpenAI's stream: the start of the call, then its arguments as they are generated."""
    for form, pieces in {
        ToolForm.HERMES: ["Ok.\n<tool", '_call>{"name": "look", "arg', 'uments": {"at"', ": 1", "}}\n</tool", "_call>"],
        ToolForm.MISTRAL_ARGS: ["Ok.", "[TOOL_CALLS]look", '[ARGS]{"at"', ": 1", "}"],
        ToolForm.MISTRAL: ["Ok.", '[TOOL_CALLS][{"name": "look", "arguments": {"at"', ": 1", "}", "}]"],
        ToolForm.LLAMA: ["Ok.", '<|python_tag|>{"name": "look", "parameters": {"at"', ": 1", "}}"],
    }.items():
        choices = stream(form, pieces)
        begun = next(choice["delta"]["tool_calls"][0] for choice in choices if "tool_calls" in choice["delta"])
        call_id = begun["id"]
        assert begun["id"].isalnum() or begun["id"].startswith("call_")
        deltas = [choice["delta"] for choice in choices]
        assert deltas == [
            {"role": "assistant", "content": ""},
            {"content": "Ok."},
            {"tool_calls": [{
                "index": 0, "id": call_id, "type": "function", "function": {"name": "look", "arguments": ""},
            }]},
            *({"tool_calls": [{"index": 0, "function": {"arguments": text}}]} for text in ('{"at"', ": 1", "}")),
            {},
        ]  # fmt: skip
        assert [choice["finish_reason"] for choice in choices] == [None] * 6 + ["tool_calls"]


def test_mistrals_client_gets_each_call_in_one_piece() -> None:
    call = '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
    agent = "mistral-client-python/3.7.0"
    choices = stream(ToolForm.HERMES, [*f"Ok. {call}\n{call}"], agent)
    calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
    assert [(call["index"], call["function"]) for call in calls] == [
        (i, {"name": "look", "arguments": '{"at": 1}'}) for i in range(2)
    ]
    assert calls[0]["id"] != calls[1]["id"]
    assert choices[-1]["finish_reason"] == "tool_calls"


def test_without_parallel_calls_a_stream_has_one_call() -> None:
    call = '<tool_call>{"name": "find"}</tool_call>'
    for parallel, wanted in ((True, [0, 1]), (False, [0])):
        choices = stream(ToolForm.HERMES, [call, call, " done"], parallel_tool_calls=parallel)
        calls = [call for choice in choices for call in choice["delta"].get("tool_calls", ())]
        assert [call["index"] for call in calls if "id" in call] == wanted
        assert all(call["function"]["arguments"] == "{}" for call in calls if "id" not in call)


def test_text_that_starts_like_a_call_stays_text() -> None:
    choices = stream(ToolForm.HERMES, ["<tool_call>", '{"name": "lo'])
    assert [choice["delta"].get("content") for choice in choices] == ["", '<tool_call>{"name": "lo', None]
    assert choices[-1]["finish_reason"] == "stop"


@pytest.mark.parametrize(
    ("pieces", "reason"),
    [
        (['<tool_call>{"name": "look", "arguments": {"at": 1'], "stop"),  # the model ended in its midst
        (['<tool_call>{"name": "look", "arguments": {"at": 1,}}</tool_call>'], "stop"),
        (['<tool_call>{"name": "find"}</tool_call>', '<tool_call>{"name": "look", "arguments": {'], "tool_calls"),
    ],
)
def test_a_call_cut_off_by_the_end_is_text(pieces: list[str], reason: str) -> None:
    for agent in ("", "mistral-client-python/3.7.0"):  # in pieces, and whole calls alone, as in an answer of one piece
        assert stream(ToolForm.HERMES, pieces, agent)[-1]["finish_reason"] == reason


@pytest.mark.parametrize("count", [1, 300])
def test_schemas_of_tools_that_are_far_too_long_are_not_read(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading them would take seconds, in which nothing else is served."""
    read = list[Any]()
    monkeypatch.setattr(tool_use, "closed", lambda schema: read.append(schema) or closed(schema))
    fields = {f"field_{i}": {"type": "integer", "title": "Field"} for i in range(6000 // count)}
    schema = {"type": "object", "properties": fields}
    tools = [{"function": {"name": f"f{i}", "parameters": schema, "strict": True}} for i in range(count)]
    body, tokenizer = Body({"tools": tools}, ViolationCollector()), FakeTokenizer()
    tool_use.answer_form(body, RequestFields(), tool_use.read_tools(body, tokenizer), tokenizer, ())  # type: ignore[arg-type]
    (violation,) = body.violations.found
    assert violation.field == "tools"
    assert violation.description.endswith("65536 bytes; simplify them")
    assert read == []


@pytest.mark.parametrize(
    "alternatives",
    [
        {"enum": [*range(500)]},
        {"anyOf": [{"const": i} for i in range(500)]},
        {"anyOf": [{"$ref": "#/$defs/one"}] * 500},
    ],
)
def test_parameters_that_share_too_many_alternatives_are_refused(alternatives: dict[str, Any]) -> None:
    """A small body may refer to them so often that the grammar takes seconds, in which nothing else is served."""
    shared = {f"p{i}": {"$ref": "#/$defs/any"} for i in range(100)}
    schema = {"type": "object", "properties": shared, "$defs": {"any": alternatives, "one": {"type": "integer"}}}
    tools = [{"function": {"name": "f", "parameters": schema, "strict": True}}]
    body, tokenizer = Body({"tools": tools}, ViolationCollector()), FakeTokenizer()
    use = tool_use.read_tools(body, tokenizer)  # type: ignore[arg-type]
    assert use is not None
    use = replace(use, form=ToolForm.QWEN_XML)
    tool_use.answer_form(body, RequestFields(), use, tokenizer, ())  # type: ignore[arg-type]
    (violation,) = body.violations.found
    assert (violation.field, "16384 alternatives" in violation.description) == ("tools", True)


@pytest.mark.parametrize("tool", [{"type": "web_search"}, {"type": "custom", "custom": {"name": "f"}}])
def test_a_tool_of_another_type_is_refused_as_such(tool: dict[str, Any]) -> None:
    (found,) = violations(parse_chat, BODY | {"tools": [tool]})
    assert (found.field, "tools of other types are not served" in found.description) == ("tools[0].function", True)
