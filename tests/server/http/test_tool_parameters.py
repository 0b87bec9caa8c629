"""Parameters of calls in the form of Qwen3-Coder: what a template writes is read back, whatever the values hold."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

from server.http import tool_parameters
from server.http.answer_parser import CallArguments, CallEnd, ToolCall
from server.http.tool_parameters import ParameterText, ParameterTypes, unenforced
from server.http.tool_use import AnswerForm, ToolUse
from server.json_schemas import JSON_TYPES, branches
from specdec.grammar.state import GrammarState
from specdec.models.chat_template import ChatTemplate
from specdec.models.tool_forms import ToolForm
from tests.grammar.helpers import EOS, byte_level, ids_of, start
from tests.models.xml_template import xml_template
from tests.server.http.test_answer_parser import CUTS, pieces_of

TEMPLATES = [ChatTemplate(xml_template(python_scalars=each), {}) for each in (False, True)]
TAGS = [
    "<tool_call>",
    "<function=f>",
    "<parameter=a>",
    "</parameter>",
    "</function>",
    "</tool_call>",
    "</parameter",
    "<",
]
OTHERS = ["null", "None", "true", "5", "-", "[", "[1]", "{", "{}", '"', "\\", "\n", "\n", " ", "é", "n"]
TEXT = st.one_of(
    st.text(max_size=8), st.lists(st.sampled_from([*TAGS, *OTHERS]), max_size=6).map("".join), st.sampled_from(OTHERS)
)
END = re.compile(r"</parameter>\s*(<parameter=|</function>|</tool_call>)")
LINES = re.compile("(?<=\n)</parameter>(?=\n)")  # of which a value of a grammar holds none
ENDS = [
    "</parameter>\n<parameter=",
    "</parameter><parameter=both>x",
    "</parameter></function>",
    "</parameter>\n</tool_call>",
]
SCALAR = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False, allow_infinity=False))
NESTED = st.recursive(
    st.one_of(SCALAR, TEXT),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXT, inner, max_size=3)),
    max_leaves=6,
)
DEFINED = {"text": {"type": "string", "minLength": 1}, "both": {"anyOf": [{"$ref": "#/$defs/text"}, {"type": "array"}]}}


def is_only_text(text: str) -> bool:
    """Whether ``text`` is no value of another type."""
    try:
        value = json.loads(text)
    except ValueError:
        value = text
    return isinstance(value, str) and text.strip().lower() not in ("null", "none", "true", "false")


PLAIN = TEXT.filter(is_only_text)
KINDS: list[tuple[dict[str, Any], st.SearchStrategy[Any]]] = [
    ({"type": "string"}, TEXT),
    ({"$ref": "#/$defs/text"}, TEXT),
    ({"enum": ["1", "null", ""]}, st.sampled_from(["1", "null", ""])),
    (
        {"type": ["string", "null"]},
        st.one_of(st.none(), TEXT.filter(lambda text: text.lower() not in ("null", "none"))),
    ),
    ({"anyOf": [{"type": "string"}, {"type": "integer"}]}, st.one_of(st.integers(), PLAIN)),
    ({"$ref": "#/$defs/both", "description": "x"}, st.one_of(st.lists(SCALAR, max_size=3), PLAIN)),
    ({}, st.one_of(NESTED.filter(lambda value: not isinstance(value, str)), PLAIN)),
    ({"type": "integer"}, st.integers()),
    ({"type": "number"}, st.floats(allow_nan=False, allow_infinity=False)),
    ({"type": "boolean"}, st.booleans()),
    ({"type": ["boolean", "null"]}, st.one_of(st.none(), st.booleans())),
    ({"type": "array"}, st.lists(NESTED, max_size=3)),
    ({"type": "object"}, st.dictionaries(TEXT, NESTED, max_size=3)),
]
KEYS = st.text(st.characters(codec="utf-8", exclude_characters=">\n"), min_size=1, max_size=6)


@st.composite
def called(draw: st.DrawFn) -> tuple[dict[str, Any], dict[str, Any]]:
    """A schema, and arguments that match it."""
    kinds = draw(st.dictionaries(KEYS, st.sampled_from(KINDS), max_size=4))
    schema = {"type": "object", "properties": {key: kind for key, (kind, _) in kinds.items()}, "$defs": DEFINED}
    return schema, {key: draw(values) for key, (_, values) in kinds.items()}


def written(arguments: Mapping[str, Any], template: ChatTemplate = TEMPLATES[0]) -> str:
    """The text of a call."""
    call = {"function": {"name": "f", "arguments": arguments}}
    shown = template.render(
        [{"role": "assistant", "content": "", "tool_calls": [call]}], {"add_generation_prompt": False}
    )
    return shown.removeprefix("<|im_start|>assistant\n\n").removesuffix("<|im_end|>\n")


def can_be_written(arguments: Mapping[str, Any]) -> bool:
    """Whether no value holds the end of one."""
    return len(END.findall(written(arguments))) == len(arguments)


def using(schema: Mapping[str, Any], **options: Any) -> ToolUse:
    return ToolUse([{"function": {"name": "f", "parameters": schema}}], ToolForm.QWEN_XML, **options)


@given(case=called(), template=st.sampled_from(TEMPLATES), cuts=CUTS)
def test_arguments_that_a_template_wrote_are_read_back(
    case: tuple[dict[str, Any], dict[str, Any]], template: ChatTemplate, cuts: list[int]
) -> None:
    schema, arguments = case
    assume(can_be_written(arguments))
    text, use = written(arguments, template), using(schema)
    for pieces in (pieces_of(text, cuts), [*text]):
        parser = AnswerForm(use).parser()
        parts = [part for piece in pieces for part in parser.push(piece)] + parser.flush()
        found = "".join(part.text for part in parts if isinstance(part, CallArguments))
        assert [part.is_whole for part in parts if isinstance(part, CallEnd)] == [True]
        assert not [part for part in parts if isinstance(part, str)]
        assert json.dumps(json.loads(found)) == json.dumps(arguments)  # True is not 1
    (call,) = AnswerForm(use).parse(text)[0]
    assert isinstance(call, ToolCall)
    assert call.arguments == found


def accepts(found: GrammarState, text: str) -> bool:
    """Whether the masks allow ``text``, and then its end."""
    for token in byte_level().encode(text, add_special=False):
        if token not in ids_of(found.mask(())):
            return False
        found.commit([token])
    return EOS in ids_of(found.mask(()))


def grammar(use: ToolUse) -> GrammarState:
    params = use.grammar(byte_level())
    assert params is not None
    return start(params)


@given(case=called())
def test_a_grammar_accepts_what_a_template_wrote(case: tuple[dict[str, Any], dict[str, Any]]) -> None:
    schema, arguments = case
    text = written(arguments)
    assume(can_be_written(arguments) and "\x7f" not in text)  # the library wants the latter escaped in JSON
    assert accepts(grammar(using(schema, required=("f",))), text) is (len(LINES.findall(text)) == len(arguments))


FIELDS: dict[str, tuple[dict[str, Any], st.SearchStrategy[Any]]] = {
    "path": ({"type": "string"}, TEXT),
    "kind": ({"$ref": "#/$defs/kind"}, st.sampled_from(["near", "far", ""])),
    "count": ({"type": "integer", "minimum": 0, "maximum": 9}, st.integers(0, 9)),
    "kinds": ({"type": "array", "items": {"$ref": "#/properties/kind"}}, st.lists(st.just("far"), max_size=2)),
    "maybe": ({"anyOf": [{"$ref": "#/$defs/kind"}, {"type": "boolean"}]}, st.sampled_from(["near", True])),
    "both": ({"type": ["string", "null"]}, st.one_of(st.none(), PLAIN)),
}
SCHEMA = {
    "type": "object",
    "properties": {key: kind for key, (kind, _) in FIELDS.items()},
    "required": ["kind", "count"],
    "$defs": {"kind": {"enum": ["near", "far", ""]}},
}
VALID: dict[str, Any] = {
    "path": lambda value: isinstance(value, str),
    "kind": lambda value: value in ("near", "far", ""),
    "count": lambda value: type(value) is int and 0 <= value <= 9,
    "both": lambda value: value is None or isinstance(value, str),
    "kinds": lambda value: isinstance(value, list) and set(value) <= {"near", "far", ""},
    "maybe": lambda value: isinstance(value, bool) or value in ("near", "far", ""),
}


@st.composite
def mangled(draw: st.DrawFn) -> str:
    """A call of `SCHEMA`, whose pieces may be in disorder."""
    values = {
        key: draw(value) for key, (_, value) in FIELDS.items() if key in SCHEMA["required"] or draw(st.booleans())
    }
    pieces = re.split(r"(<[^>]*>|\n)", written(values))
    new = st.one_of(st.sampled_from(ENDS), st.sampled_from([*pieces, *TAGS, *OTHERS]), st.just(""))
    for _ in range(draw(st.integers(0, 2))):
        at = draw(st.integers(0, len(pieces) - 1))
        pieces[at : at + draw(st.integers(0, 1))] = [draw(new)]
    return "".join(pieces)


HOSTILE = """<tool_call>
<function=f>
<parameter=path>
%s
</parameter>
<parameter=kind>
near
</parameter>
<parameter=count>
1
</parameter>
</function>
</tool_call>"""


@given(text=mangled())
@example(text=HOSTILE % "a</parameter></function>")
@example(text=HOSTILE % "a</parameter>\x1c\n<parameter=path>")
@example(text=HOSTILE % "a</parameter> </tool_call>")
@example(text=HOSTILE % "a\n</parameter>\n<mode>")
@example(text=HOSTILE.replace("%s\n", ""))
def test_a_grammar_accepts_only_what_the_parser_reads_as_a_valid_call(text: str) -> None:
    use = using(SCHEMA, required=("f",), parallel=False)
    calls = AnswerForm(use).parse(text)[0]
    (call,) = calls if len(calls) == 1 and isinstance(calls[0], ToolCall) else [None]
    pairs = [] if call is None else json.loads(call.arguments, object_pairs_hook=list)
    arguments = dict(pairs)
    is_valid = (
        len(arguments) == len(pairs)  # each once
        and {*SCHEMA["required"]} <= set(arguments) <= set(VALID)
        and all(VALID[key](value) for key, value in arguments.items())
    )
    if accepts(grammar(use), text):
        assert is_valid
    else:
        assert not is_valid or written(arguments) != text or len(LINES.findall(text)) > len(arguments)


SECRET = {"$ref": "#/definitions/loop"}
PLACES: dict[str, Any] = {
    "definitions": {"loop": {"anyOf": [{"$ref": "#/definitions/loop"}, {"type": "boolean"}]}},
    "additionalProperties": {"type": "integer"},
    "properties": {
        "text": {"type": "string"},
        "count": {"type": "integer"},
        "share": {"type": "number"},
        "flag": {"type": "boolean"},
        "list": {"type": "array"},
        "maybe": {"type": ["string", "null"]},
        "former": {"type": "string", "nullable": True},
        "version": {"anyOf": [{"type": "string"}, {"type": "integer"}]},
        "looped": SECRET,
        "free": {},
        "wrong": 5,
    },
}


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("text", "5", "5"), ("text", "", ""), ("text", "null", "null"), ("text", ' "a" ', ' "a" '),
        ("count", "5", 5), ("count", " 5.0\n", 5), ("count", "5.5", 5.5), ("count", "five", "five"), ("count", "", ""),
        ("count", "18446744073709551616", 18446744073709551616), ("share", "5.0", 5.0), ("share", "1e999", "1e999"),
        ("flag", "True", True), ("flag", "FALSE", False), ("flag", "yes", "yes"), ("flag", "None", None),
        ("list", '[1, "a"]', [1, "a"]), ("list", "['a']", "['a']"), ("list", "[" * 99 + "]" * 99, "[" * 99 + "]" * 99),
        ("maybe", "null", None), ("maybe", "None", None), ("maybe", "nullable", "nullable"), ("maybe", "5", "5"),
        ("maybe", "No", "No"), ("maybe", "[1]", "[1]"), ("former", "null", None),
        ("version", "5", 5), ("version", "5.0", "5.0"), ("version", "-", "-"), ("version", "true", "true"),
        ("looped", "true", True), ("free", '{"a": 1}\n', {"a": 1}), ("free", "{a}", "{a}"), ("free", "True", True),
        ("free", '"a"', '"a"'), ("wrong", "5", 5), ("other", "5.0", 5),
    ],
)  # fmt: skip
def test_a_value_has_a_type_of_its_schema(key: str, text: str, value: Any) -> None:
    for pieces in ([text], [*text]):
        found = ParameterText(ParameterTypes(PLACES).of(key))
        assert json.loads("".join(map(found.push, filter(None, pieces))) + found.end()) == value


def test_a_parameter_may_be_one_of_several_lists() -> None:
    either = {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"$ref": "#/$defs/b"}], "$defs": {"b": PLACES}}
    assert ParameterTypes(either).of("a") == {"string"}
    assert ParameterTypes(either).of("count") == {"integer"}
    assert accepts(grammar(using(either, required=("f",))), written({"b": "x", "a": 1}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"}, {"anyOf": []}, {"$ref": "#/$defs/a", "$defs": {"a": {"required": 5}}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"properties": 5, "additionalProperties": True}}},
        {"anyOf": 5}, {"allOf": [5]}, {"allOf": 5}, {"$ref": 5},
        {"properties": {"a": {"allOf": 5, "anyOf": [5]}}},
        {"properties": {"a": True, "b>": {}, "": {}}, "required": ["a", [], "b>"]},
        {"properties": {"a": {"enum": []}, "b": {"enum": 5}, "c": {"type": [5]}}},
    ],
)  # fmt: skip
def test_a_schema_that_says_little_allows_any_value(schema: dict[str, Any]) -> None:
    assert ParameterTypes(schema).of("a") >= {"string", "null"}
    assert accepts(grammar(using(schema, required=("f",))), written({"a": "x"}))


@pytest.mark.parametrize("root", [{"$ref": "#/$defs/root"}, {"anyOf": [{"$ref": "#/$defs/root"}]}])
def test_a_type_beside_a_reference_changes_nothing(root: dict[str, Any]) -> None:
    schema = {"type": "object", **root, "$defs": {"root": {"properties": {"a": {"type": "string", "pattern": "x"}}}}}
    assert ParameterTypes(schema).of("a") == {"string"}
    assert unenforced(schema) == "pattern: not enforced in this model's calls"
    assert unenforced({"properties": {"a": {"enum": ["x"], "pattern": "x"}}}) == ""  # its values are enforced


@pytest.mark.parametrize("keyword", ["anyOf", "oneOf", "allOf", "minProperties", "maxProperties", "patternProperties"])
def test_bug_rules_of_all_arguments_were_left_out_in_silence(keyword: str) -> None:
    value: Any = 1 if keyword.endswith("Properties") else [{"required": ["a"]}, {"required": ["b"]}]
    schema = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}, keyword: value}
    told = f"{keyword}: not enforced in this model's calls"
    assert unenforced(schema) == unenforced({"$ref": "#/$defs/a", "$defs": {"a": schema}}) == told


def test_alternatives_of_the_arguments_as_a_whole_are_named() -> None:
    lists = [{"type": "object", "properties": {each: {"type": "integer"}}, "required": [each]} for each in "ab"]
    assert unenforced({"type": "object", "anyOf": lists}) == "anyOf: not enforced in this model's calls"
    assert unenforced({"type": "object", "anyOf": lists[:1]}) == ""  # the only one is enforced
    referred = {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": lists}}}
    assert unenforced(referred) == "anyOf: not enforced in this model's calls"


def test_references_take_only_what_they_reach() -> None:
    """Three definitions for twelve parameters, one of which refers to itself and to another."""
    leaf = {"type": "object", "properties": {"x": {"enum": [1, 2]}}, "required": ["x"], "additionalProperties": False}
    tree = {"type": "array", "items": {"anyOf": [{"$ref": "#/$defs/tree"}, {"$ref": "#/$defs/le~1af"}]}}
    unused = {f"d{i}": {"type": "object", "properties": {f"p{j}": {} for j in range(30)}} for i in range(20)}
    listed = {f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 9 + i} for i in range(12)}
    schema = {"properties": listed, "$defs": {"tree": tree, "le/af": leaf, **unused}}
    params = using(schema, required=("f",)).grammar(byte_level())
    assert params is not None
    assert len(params.text) < 12_000
    found = grammar(using(schema, required=("f",)))
    assert accepts(found, written({"a1": [[{"x": 1}, []]], "a4": []}))
    assert not accepts(found, written({"a1": [[{"x": 3}]]}))


def test_a_huge_schema_is_refused_by_the_engine_and_not_worked_on() -> None:
    many: dict[str, Any] = {f"a{i}": {"type": "array", "items": {"$ref": "#/$defs/one"}} for i in range(20_000)}
    either = {"anyOf": [{"type": "integer", "minimum": i} for i in range(20_000)]}
    schema = {"properties": {**many, "either": either}, "required": [*many], "$defs": {"one": {"type": "null"}}}
    params = using(schema, required=("f",)).grammar(byte_level())
    assert params is not None
    assert 1 << 16 < len(params.text) < 1 << 23
    assert ParameterTypes(schema).of("either") == {"integer"}


def test_a_parameter_that_is_not_listed_follows_the_schema_of_further_ones() -> None:
    schema = {"properties": {"a": {"type": "boolean"}}, "additionalProperties": {"type": "integer"}}
    for arguments, valid in (({"a": True, "b": 1, "c": 2}, True), ({"b": 1}, True), ({"b": "x"}, False)):
        assert accepts(grammar(using(schema, required=("f",))), written(arguments)) is valid
    closed = {"properties": {"a": {"type": "boolean"}}}
    assert not accepts(grammar(using(closed, required=("f",))), written({"b": 1}))
    free = ToolUse([{"function": {"name": "f"}}, {"function": {"name": "g", "strict": True}}], ToolForm.QWEN_XML)
    assert accepts(grammar(free), "Well.\n" + written({"b": 1, "c": "x"}))
    assert not accepts(grammar(free), written({"b": 1}).replace("=f>", "=g>"))


def test_only_the_parameters_that_a_call_has_are_looked_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each may refer to the same thousands of alternatives, and other calls wait meanwhile."""
    looked_up = list[Any]()

    def counted(schema: Any, root: Mapping[str, Any]) -> list[dict[str, Any]]:
        looked_up.append(schema)
        return branches(schema, root)

    monkeypatch.setattr(tool_parameters, "branches", counted)
    any_of = {"anyOf": [{"const": number} for number in range(1000)]}
    schema = {"properties": {f"p{i}": {"$ref": "#/$defs/any"} for i in range(1000)}, "$defs": {"any": any_of}}
    types = ParameterTypes(schema)
    assert [types.of("p3"), types.of("p3"), types.of("other")] == [{"integer"}, {"integer"}, {*JSON_TYPES.values()}]
    assert looked_up[1:] == [{"$ref": "#/$defs/any"}, None]


def test_a_definition_that_many_parameters_refer_to_is_written_once(monkeypatch: pytest.MonkeyPatch) -> None:
    written = list[Any]()
    complete = tool_parameters._complete
    monkeypatch.setattr(tool_parameters, "_complete", lambda *args: written.append(args) or complete(*args))
    any_of: list[Any] = [{"$ref": "#/$defs/any"} for _ in range(100)]
    for values in (any_of, [{"type": "array", "items": each} for each in any_of]):
        schema = {"properties": {f"p{i}": each for i, each in enumerate(values)}, "$defs": {"any": {"type": "object"}}}
        grammar = tool_parameters.ParameterGrammar()
        grammar.add("arguments_0", schema, "//")
        assert len(written) == sum(": %json" in rule for rule in grammar.rules) == 1
        written.clear()


@pytest.mark.parametrize(
    "schema", [{"anyOf": [{"properties": [1]}]}, {"$ref": "#/$defs/a", "$defs": {"a": {"properties": "x"}}}]
)
def test_bug_properties_that_are_no_object_broke_the_call(schema: dict[str, Any]) -> None:
    assert list(tool_parameters.count_values(schema)) == []
    assert unenforced(schema) == ""
