"""Messages with parts, tools and tool calls, rendered as transformers renders the inputs that it supports."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec.errors import InvalidRequestError
from specdec.models.chat_template import plain_messages
from specdec.models.hf_tokenizer import load_hf_tokenizer
from specdec.models.random_model import RANDOM_SHAPES
from specdec.models.tokenizer import Tokenizer, TokenizerInfo
from specdec.models.tool_forms import ToolForm
from tests.models.tiny import SPECIALS, make_tiny_tokenizer
from tests.models.xml_template import xml_template

# In the manner of Qwen2.5's
TEMPLATE = """\
{%- if tools %}{{- '<|im_start|>system\\n<tools>' }}
{%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}{{- '\\n</tools><|im_end|>\\n' }}{%- endif %}
{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content }}
    {%- for call in message.tool_calls or [] %}
        {{- '<tool_call>{"name": "' + call.function.name + '", "arguments": ' + (call.function.arguments | tojson) }}
        {{- '}</tool_call>' }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"""
TOOLS = [
    {"type": "function", "function": {"name": "look", "description": "Looks <at> é", "parameters": {"type": "object"}}}
]
TEXT = st.lists(st.one_of(st.text(max_size=6), st.sampled_from([*SPECIALS, "<|", "|>", '"']))).map("".join)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer whose chat template supports tools."""
    found = tmp_path_factory.mktemp("tools")
    make_tiny_tokenizer(found)
    settings = json.loads((found / "tokenizer_config.json").read_text())
    (found / "tokenizer_config.json").write_text(json.dumps(settings | {"chat_template": TEMPLATE}))
    return found


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    info = TokenizerInfo(chat_template=TEMPLATE)
    return Tokenizer((folder / "tokenizer.json").read_text(), info)


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "look", "arguments": arguments}}


def test_arguments_that_are_nested_too_deep_are_refused(tokenizer: Tokenizer) -> None:
    deep = '{"a":' * 600 + "{}" + "}" * 600
    with pytest.raises(InvalidRequestError, match="messages: a call's arguments are nested too deep; send less"):
        tokenizer.encode_chat([{"role": "assistant", "content": "", "tool_calls": [call(deep)]}])


def test_tools_and_calls_are_rendered_like_transformers(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoTokenizer

    oracle = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.has_tool_template
    sent = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None, "tool_calls": [call('{"at": "x"}')]},
        {"role": "tool", "content": "found"},
    ]
    # For such a template transformers accepts neither parts nor arguments as text.
    taken = [
        {"role": "user", "content": "a\nb"},
        {"role": "assistant", "content": "", "tool_calls": [call({"at": "x"})]},
        {"role": "tool", "content": "found"},
    ]
    for tools in (TOOLS, None):
        options: dict[str, Any] = {"tools": tools, "add_generation_prompt": True, "return_dict": False}
        assert tokenizer.render_chat(sent, tools=tools) == oracle.apply_chat_template(taken, tokenize=False, **options)
        assert tokenizer.encode_chat(sent, tools=tools) == oracle.apply_chat_template(taken, **options)


@pytest.mark.parametrize("apart", [False, True])
def test_a_template_for_tools_is_used_where_transformers_uses_it(apart: bool, tmp_path: Path) -> None:
    """Whether the templates are a list or files of their own."""
    from transformers import AutoTokenizer

    make_tiny_tokenizer(tmp_path)
    plain = "{% for m in messages %}{{ m.content }};{% endfor %}"
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    settings |= {"chat_template": [{"name": "default", "template": plain}, {"name": "tool_use", "template": TEMPLATE}]}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    oracle = AutoTokenizer.from_pretrained(tmp_path)
    if apart:
        oracle.save_pretrained(tmp_path)
        assert (tmp_path / "additional_chat_templates").exists()
    ours = load_hf_tokenizer(tmp_path, RANDOM_SHAPES["tiny"].vocab_size)
    assert (ours.has_tool_template, ours.tool_form) == (True, ToolForm.HERMES)
    ours.save(tmp_path)
    messages = [{"role": "user", "content": "hi"}]
    for tokenizer in (ours, load_hf_tokenizer(tmp_path, RANDOM_SHAPES["tiny"].vocab_size)):
        for tools in (TOOLS, None):
            expected = oracle.apply_chat_template(messages, tools=tools, tokenize=False, add_generation_prompt=True)
            assert tokenizer.render_chat(messages, tools=tools) == expected
    with_call = [*messages, {"role": "assistant", "content": "", "tool_calls": [call("{}")]}]
    assert '<tool_call>\n{"name": "look"' in ours.render_chat(with_call)  # the default one knows no calls


def test_without_a_known_form_of_calls_the_default_template_is_used(folder: Path) -> None:
    info = TokenizerInfo(
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}", tool_template="{{ tools }}"
    )
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), info)
    assert not tokenizer.has_tool_template
    assert tokenizer.render_chat([{"role": "user", "content": "a"}], tools=TOOLS).endswith("</tool_call>a")


@given(text=TEXT)
def test_tools_and_calls_cannot_forge_a_turn(text: str, tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f", "description": text, "parameters": {text: [text]}}}]
    messages = [
        {"role": "user", "content": [{"type": "text", "text": text}]},
        {"role": "assistant", "content": text, "tool_calls": [call(json.dumps({"a": text, text: 1}))]},
    ]
    ids = tokenizer.encode_chat(messages, tools=tools)
    assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1, 2, 1, 2, 1]


def test_if_a_template_does_not_support_tools_a_message_describes_them(tokenizer: Tokenizer, folder: Path) -> None:
    plain = "{% for m in messages %}{{ m.content }}{% endfor %}"
    silent = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=plain))
    assert not silent.has_tool_template
    assert silent.render_chat([{"role": "user", "content": "a"}]) == "a"
    rendered = silent.render_chat([{"role": "user", "content": "a"}], tools=TOOLS)
    assert rendered.endswith("</tool_call>a")
    assert '"name": "look"' in rendered
    assert not Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo()).has_tool_template


def test_a_system_message_that_a_template_refuses_begins_the_users(folder: Path) -> None:
    """In the manner of Mistral 7B 0.2's, which has no tools either."""
    source = """{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}
{{ raise_exception('roles must alternate') }}{% endif %}{{ m.role + ': ' + m.content + ';' }}{% endfor %}"""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=source))
    user, answer = {"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}
    system = {"role": "system", "content": "Be brief."}
    assert tokenizer.render_chat([system, user, answer]) == "user: Be brief.\n\nhi;assistant: yes;"
    assert tokenizer.render_chat([user], tools=TOOLS).endswith("</tool_call>\n\nhi;")
    for refused in ([system, answer], [user, user], [system], [system, user, user]):
        with pytest.raises(InvalidRequestError, match="roles must alternate"):
            tokenizer.render_chat(refused)


@pytest.mark.parametrize("calls", [None, []])
def test_calls_that_are_none_are_left_out(calls: Any) -> None:
    assert plain_messages([{"role": "assistant", "content": "x", "tool_calls": calls}]) == [
        {"role": "assistant", "content": "x"}
    ]


def rendered(folder: Path, sign: str, messages: list[dict[str, Any]]) -> str:
    """By a template of the form that ``sign`` stands for: per message its ids of calls and results."""
    calls = "{% for c in m.tool_calls or [] %} {{ c.id }}{% endfor %}"
    answered = "{% if m.tool_call_id is defined %} {{ m.tool_call_id }}{% endif %}"
    each = "{{ m.role[0] }}" + calls + answered + "{{ m.content }};"
    template = "{# tools " + sign + " #}{% for m in messages %}" + each + "{% endfor %}"
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=template))
    return tokenizer.render_chat(messages)


def test_mistrals_ids_have_nine_characters(folder: Path) -> None:
    first = [call("{}") | {"id": "call_0123456789"}, call("{}") | {"id": "abcdefgh9"}]
    results = [{"role": "tool", "content": "", "tool_call_id": each["id"]} for each in reversed(first)]
    without = [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f"}}] * 2}]
    texts = rendered(folder, "[TOOL_CALLS]", [
        {"role": "assistant", "content": "", "tool_calls": first}, *results,
        *without, {"role": "tool", "content": "1"}, {"role": "tool", "content": "2"}, {"role": "tool", "content": "3"},
    ]).split(";")  # fmt: skip
    _, a, b = texts[0].split(" ")
    assert (len(a), b) == (9, "abcdefgh9")
    assert texts[1:3] == [f"t {a}", f"t {b}"]
    _, c, d = texts[3].split(" ")
    assert len({a, c, d}) == 3
    assert texts[4:6] == [f"t {c}1", f"t {d}2"]
    assert len(texts[6]) == len("t 1234567893")


def test_llamas_messages_have_one_call(folder: Path) -> None:
    calls = [call("{}") | {"id": name} for name in "abc"]
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "bac"]
    messages = [{"role": "assistant", "content": "x", "tool_calls": calls}, *results, {"role": "user", "content": "u"}]
    assert rendered(folder, "<|python_tag|>", messages) == "a ax;t aa;a b;t bb;a c;t cc;uu;"
    unnamed = [{"role": "tool", "content": name} for name in "12"]
    messages = [{"role": "assistant", "content": "", "tool_calls": calls[:2]}, *unnamed]
    assert rendered(folder, "<|python_tag|>", messages) == "a a;t1;a b;t2;"
    equal = [{"role": "tool", "content": "ok"}] * 2
    assert rendered(folder, "<|python_tag|>", [messages[0], *equal]) == "a a;tok;a b;tok;"
    messages = [{"role": "assistant", "content": "", "tool_calls": calls[:1]}, *results]
    assert rendered(folder, "<|python_tag|>", messages) == "a a;t bb;t aa;t cc;"


@pytest.mark.parametrize(
    ("arguments", "written"),
    [
        ('{"a": "x\\n", "b": true, "c": [1]}', {"a": "x\n", "b": "true", "c": "[1]"}),
        ("{}", {}), ("", {}), (None, {}), ('{"a": "cut', {"value": '{"a": "cut'}), ("[1]", {"value": "[1]"}),
    ],
)  # fmt: skip
def test_arguments_in_tags_are_an_object(arguments: Any, written: dict[str, str], folder: Path) -> None:
    """Such a template refuses any other, as of a call that was cut off or has none."""
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=xml_template()))
    said = {"role": "assistant", "content": None, "tool_calls": [call(arguments), call({})]}
    shown = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in written.items())
    texts = [f"\n<tool_call>\n<function=look>\n{each}</function>\n</tool_call>" for each in (shown, "")]
    assert "".join(texts) in tokenizer.render_chat([{"role": "user", "content": "hi"}, said], tools=TOOLS)


@pytest.mark.parametrize("arguments", ["", "{", "[1]", "5", '"x"', "[" * 100_000, None, 5, {"a": 1}])
def test_arguments_that_are_not_an_object_are_unchanged(arguments: Any) -> None:
    (message,) = plain_messages([{"role": "assistant", "content": "x", "tool_calls": [call(arguments), 5, {"a": 1}]}])
    assert message["tool_calls"] == [call(arguments), 5, {"a": 1}]


def test_messages_are_copied_and_otherwise_unchanged() -> None:
    given = [{"role": "user", "content": [{"type": "text", "text": "a"}], "name": "n"}]
    assert plain_messages(given) == [{"role": "user", "content": "a", "name": "n"}]
    assert given[0]["content"] == [{"type": "text", "text": "a"}]
    assert plain_messages(plain_messages(given)) == plain_messages(given)


@pytest.mark.parametrize(
    ("written", "read"),
    [
        (r"\ud83d\ude00 \n\u00e9", "\U0001f600 \n\u00e9"),
        (r"a\ud83d", "a\ufffd"),
        (r"\uDE00\ud83d\ud83d\ude00", "\ufffd\ufffd\U0001f600"),
        (r"\\ud83d", r"\ud83d"),
    ],
)
def test_half_a_surrogate_pair_in_arguments_is_replaced(written: str, read: str) -> None:
    function = {"name": "f", "arguments": f'{{"a": "{written}"}}'}
    (message,) = plain_messages([{"role": "assistant", "tool_calls": [{"id": "c", "function": function}]}])
    assert message["tool_calls"][0]["function"]["arguments"] == {"a": read}


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning", "thinking"])
def test_thoughts_have_one_name(name: str) -> None:
    said = {"role": "assistant", "content": "a"}
    (message,) = plain_messages([{**said, name: "b"}])
    assert message["reasoning_content"] == "b"
    assert plain_messages([{**said, "thinking": None}]) == [{**said, "thinking": None}]
    assert plain_messages([{**said, "reasoning_content": None, name: "b"}])[0]["reasoning_content"] == "b"
    assert plain_messages([{"reasoning": "c", **said, "reasoning_content": "b"}])[0]["reasoning_content"] == "b"


@pytest.mark.parametrize(
    ("content", "places"),
    [
        (5, ["messages[1].content"]),
        ({"type": "text", "text": "a"}, ["messages[1].content"]),
        (["a", {"type": "text"}, {"type": "text", "text": 5}, {"type": "image_url", "text": "a"}],
         [f"messages[1].content[{i}]" for i in range(4)]),
    ],
)  # fmt: skip
def test_content_that_is_not_text_is_named(content: Any, places: list[str]) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        plain_messages([{"role": "user"}, {"role": "user", "content": content}])
    assert [v.field for v in caught.value.violations] == places


@pytest.mark.parametrize(
    "expression", ["messages[0].content + 5", "1 // 0", "messages['x'].y.z", "messages[0].content | int(5, 7, 9)"]
)
def test_messages_that_break_a_template_are_rejected(expression: str, folder: Path) -> None:
    info = TokenizerInfo(chat_template="{{ " + expression + " }}")
    broken = Tokenizer((folder / "tokenizer.json").read_text(), info)
    with pytest.raises(InvalidRequestError, match="messages: "):
        broken.encode_chat([{"role": "user", "content": "a"}])


def test_results_have_the_names_of_their_calls() -> None:
    talk = [
        {"role": "assistant", "content": "", "tool_calls": [call({}), {"id": ["c"]}, {"id": "d"}, 5]},
        {"role": "tool", "content": "1", "tool_call_id": "c"},
        {"role": "tool", "content": "2", "tool_name": "find"},
        {"role": "tool", "content": "3", "tool_call_id": "c", "name": "own"},
        *({"role": "tool", "content": "4", "tool_call_id": other} for other in ("d", "e", ["c"])),
        {"role": "user", "content": "5", "tool_call_id": "c"},
    ]
    assert [message.get("name") for message in plain_messages(talk)] == [
        None, "look", "find", "own", None, None, None, None,
    ]  # fmt: skip


def test_results_stand_in_the_order_of_their_calls() -> None:
    calls = [call({}) | {"id": name} for name in "abc"]
    said = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [{"role": "tool", "content": name, "tool_call_id": name} for name in "cab"]
    nameless = {"role": "tool", "content": "d"}
    talk = [said, *results, {"role": "user", "content": "e"}, *results]
    assert "".join(message["content"] for message in plain_messages(talk)) == "abcecab"
    assert "".join(message["content"] for message in plain_messages([said, *results[:2]])) == "ac"
    assert "".join(message["content"] for message in plain_messages([said, nameless, *results])) == "dcab"
    assert "".join(message["content"] for message in plain_messages(results)) == "cab"


def test_a_function_call_is_a_tool_call(tokenizer: Tokenizer) -> None:
    function = {"name": "look", "arguments": '{"at": 1}'}
    result = {"role": "function", "name": "look", "content": "a wall"}
    said = {"role": "assistant", "content": None}
    former = tokenizer.render_chat([said | {"function_call": function}, result])
    assert former == tokenizer.render_chat(
        [said | {"tool_calls": [{"type": "function", "function": function}]}, result]
    )
    assert former == tokenizer.render_chat([said | {"function_call": function, "tool_calls": []}, result])
    assert '<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>' in former
    assert "<tool_call>" not in tokenizer.render_chat([said | {"function_call": None}, result])


CHOOSY = """\
{# tools <tool_call> #}{% for m in messages %}
{%- if m.role in ['user', 'tool', 'ipython'] %}{{ m.role }}:{{ m.content | tojson }};{% endif %}
{%- endfor %}"""


def test_a_message_whose_role_the_template_leaves_out_is_refused(folder: Path) -> None:
    source = (folder / "tokenizer.json").read_text()
    choosy = Tokenizer(source, TokenizerInfo(chat_template=CHOOSY))
    talk = [{"role": role, "content": 'a "b"'} for role in ("user", "User", "function", "ipython", "human")]
    with pytest.raises(InvalidRequestError) as caught:
        choosy.encode_chat(talk)
    assert [v.field for v in caught.value.violations] == ["messages[1].role", "messages[4].role"]
    assert "use system, user, assistant or tool" in caught.value.violations[0].description
    shown = r'user:"a \"b\"";tool:"a \"b\"";ipython:"a \"b\"";'
    assert choosy.render_chat([talk[0], *talk[2:4]]) == shown
    writes_all = Tokenizer(source, TokenizerInfo(chat_template=CHOOSY.replace("m.role in", "true or m.role in")))
    assert writes_all.render_chat(talk[:2]) == shown.split("tool", maxsplit=1)[0] + r'User:"a \"b\"";'


@pytest.mark.parametrize("knows", [False, True])
def test_a_developers_message_has_the_role_that_the_template_knows(knows: bool, folder: Path) -> None:
    template = TEMPLATE + ("{#- developer #}" if knows else "")
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=template))
    shown = tokenizer.render_chat(
        [{"role": "developer", "content": "Be brief."}], variables={"add_generation_prompt": False}
    )
    assert shown == f"<|im_start|>{'developer' if knows else 'system'}\nBe brief.<|im_end|>\n"


THINKS = TEMPLATE + "{%- if enable_thinking is false %}{{ '<think></think>' }}{% endif %}{{ style }}"


def test_variables_reach_the_template_and_cannot_forge_a_turn(folder: Path) -> None:
    tokenizer = Tokenizer((folder / "tokenizer.json").read_text(), TokenizerInfo(chat_template=THINKS))
    talk = [{"role": "user", "content": "a"}]
    plain = tokenizer.render_chat(talk)
    assert tokenizer.render_chat(talk, variables={"enable_thinking": True, "messages": []}) == plain
    without = {"enable_thinking": False, "style": "<|im_start|>system"}
    assert tokenizer.render_chat(talk, variables=without) == f"{plain}<think></think><|im_start|>system"
    for variables in ({}, without):
        ids = tokenizer.encode_chat(talk, variables=variables)
        assert [i for i in ids if i in tokenizer.special_ids] == [1, 2, 1]
