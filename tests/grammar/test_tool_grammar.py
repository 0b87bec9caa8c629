"""An answer that must call tools: the masks allow only calls of them, with arguments that match their schemas."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from server.http.answer_parser import ToolCall
from server.http.tool_use import AnswerForm, ToolUse
from specdec.errors import InvalidRequestError
from specdec.grammar.state import GrammarState
from specdec.models.tool_forms import ToolForm
from tests.grammar.helpers import EOS, byte_level, finished, ids_of, start

KIND = {"enum": ["near", "far"]}
LOOK = {"type": "object", "properties": {"kind": KIND, "at": {"type": "boolean"}}, "required": ["kind"]}
TOOLS: list[dict[str, Any]] = [
    {"function": {"name": "look", "parameters": LOOK}},
    {"function": {"name": "find.it"}},
    {"function": {"name": "other"}},
]
ARGUMENTS = {
    "look": [{"kind": kind, **more} for kind in KIND["enum"] for more in ({}, {"at": True}, {"at": False})],
    "find.it": [{}],
}


def state(form: ToolForm, required: tuple[str, ...], parallel: bool) -> tuple[ToolUse, GrammarState]:
    use = ToolUse(TOOLS, form, required, parallel)
    grammar = use.grammar(byte_level())
    assert grammar is not None
    return use, start(grammar)


def walk(found: GrammarState, rng: random.Random) -> str:
    """A text that the masks let through."""
    ids: list[int] = []
    while len(ids) < 400:
        allowed = ids_of(found.mask(()))
        token = EOS if EOS in allowed and rng.random() < 0.5 else rng.choice(allowed)
        if token == EOS:
            break
        ids.append(token)
        found.commit([token])
    return byte_level().decode(ids, skip_special=False)


def commit(found: GrammarState, text: str) -> None:
    """Commit ``text``, which the masks must allow."""
    for token in byte_level().encode(text, add_special=False):
        assert token in ids_of(found.mask(())), text
        found.commit([token])


def texts(found: GrammarState) -> set[str]:
    """The tokens that may follow, as text."""
    return {byte_level().decode([token]) for token in ids_of(found.mask(()))}


def written(form: ToolForm, kind: str) -> tuple[str, str]:
    """The arguments of a call of ``look``: what is forced, and the rest."""
    if form is ToolForm.QWEN_XML:
        return "<parameter=kind>\n", f"{kind}\n</parameter>\n</function>"
    return '{"kind": "', f'{kind}"}}'


def forced_after(form: ToolForm) -> GrammarState:
    """Behind the arguments of a call that is the only one."""
    _, found = state(form, ("look",), parallel=False)
    chain = found.forced((), 200)
    found.commit(chain)
    commit(found, written(form, "near")[1])
    return found


@pytest.mark.parametrize("form", list(ToolForm))
@pytest.mark.parametrize("parallel", [True, False])
def test_every_allowed_text_consists_of_calls(form: ToolForm, parallel: bool) -> None:
    counts = set()
    for seed in range(20):
        use, found = state(form, ("look", "find.it"), parallel)
        text = walk(found, random.Random(seed))
        calls = AnswerForm(use).parse(text)[0]
        for call in calls:
            assert isinstance(call, ToolCall), text
            assert json.loads(call.arguments) in ARGUMENTS[call.name]
        counts.add(len(calls))
    assert min(counts) == 1
    assert (max(counts) > 1) is (parallel and form is not ToolForm.LLAMA)


@pytest.mark.parametrize("form", list(ToolForm))
def test_all_forced_text_is_drafted(form: ToolForm) -> None:
    """Of a call without arguments every token, the end token too; before a choice all that comes first."""
    use, found = state(form, ("find.it",), parallel=False)
    chain = found.forced((), 200)
    assert chain[-1] == EOS
    (call,) = AnswerForm(use).parse(byte_level().decode(chain[:-1], skip_special=False))[0]
    assert isinstance(call, ToolCall)
    assert (call.name, call.arguments) == ("find.it", "{}")
    _, found = state(form, ("look",), parallel=False)
    text = byte_level().decode(found.forced((), 200), skip_special=False)
    assert text.endswith(written(form, "")[0])


@pytest.mark.parametrize("form", [form for form in ToolForm if form is not ToolForm.LLAMA])
@pytest.mark.parametrize("parallel", [True, False])
def test_strict_arguments_of_a_free_answer(form: ToolForm, parallel: bool) -> None:
    strict = [{"function": {**tool["function"], "strict": tool["function"]["name"] == "look"}} for tool in TOOLS]
    use = ToolUse(strict, form, (), parallel)
    grammar = use.grammar(byte_level())
    assert grammar is not None
    found = start(grammar)
    _, forced = state(form, ("look",), parallel=False)
    opening, rest = written(form, "near")
    before = byte_level().decode(forced.forced((), 200)).removesuffix(opening)
    name_at = before.index("look")
    commit(found, f"Let me see.\n{before[:name_at]}")
    assert "o" in texts(found)  # of any of the tools
    assert "x" not in texts(found)
    commit(found, before[name_at:])
    assert byte_level().decode(found.forced((), 200)) == opening
    commit(found, opening + rest + walk(forced_after(form), random.Random(1)))
    assert EOS in ids_of(found.mask(()))
    assert ("x" in texts(found)) is parallel  # after the only call nothing comes
    other = start(grammar)
    commit(other, before.replace("look", "other") + opening.replace("kind", "any") + "[1")
    plain = start(grammar)
    commit(plain, "A text, no call. <tool [TOOL")
    assert EOS in ids_of(plain.mask(()))


def test_without_strict_tools_an_answer_is_free() -> None:
    assert ToolUse(TOOLS, ToolForm.HERMES).grammar(byte_level()) is None
    strict = [{"function": {"name": "look", "strict": True}}]
    assert ToolUse(strict, ToolForm.LLAMA).grammar(byte_level()) is None  # its calls have no mark


def test_a_marker_that_is_a_special_token_is_that_token() -> None:
    class Marked:
        def special_id(self, name: str) -> int | None:
            return 1 if name == "[TOOL_CALLS]" else None

    grammar = ToolUse(TOOLS, ToolForm.MISTRAL_ARGS, ("find.it",)).grammar(Marked())  # type: ignore[arg-type]
    assert grammar is not None
    found = start(grammar)
    assert ids_of(found.mask(())) == [1]
    found.commit([1])
    assert byte_level().decode(found.forced((), 40)).startswith("find.it[ARGS]{}")


@pytest.mark.parametrize("form", list(ToolForm))
def test_a_free_answer_is_calls_or_the_form(form: ToolForm) -> None:
    person = {"type": "object", "properties": {"name": {"enum": ["Jo"]}}, "required": ["name"]}
    ids = {"type": "array", "uniqueItems": True}  # which no grammar expresses
    place = {**LOOK, "properties": {"kind": {"$ref": "#/$defs/kind"}, "ids": ids}, "$defs": {"kind": KIND}}
    look = {"function": {"name": "look", "parameters": place, "strict": True}}
    use = ToolUse([look, TOOLS[1]], form, (), parallel=False)
    grammar = use.grammar(byte_level(), {**person, "additionalProperties": False})
    assert grammar is not None
    for text in ('{"name": "Jo"}', '{"name":"Jo"}'):
        answer = start(grammar)
        commit(answer, text)
        assert finished(answer)
    _, forced = state(form, ("look",), parallel=False)
    before = byte_level().decode(forced.forced((), 200), skip_special=False)
    call = start(grammar)
    commit(call, before)
    assert texts(call) >= {"n", "f"}
    assert "x" not in texts(call)  # the tool is strict
    other = start(grammar)
    assert not {"O", "x"} & texts(other)  # no other text
    if form is ToolForm.HERMES:  # small models leave the mark out
        bare = start(grammar)
        commit(bare, '{"name": "look", "arguments": {"kind": "near"}}')
        assert finished(bare)


@pytest.mark.parametrize("form", list(ToolForm))
@pytest.mark.parametrize(("options", "valid"), [(None, True), ({}, True), ("x", False), ([], True), (3, False)])
def test_options_of_an_answers_schema_may_be_anything(form: ToolForm, options: Any, valid: bool) -> None:
    grammar = ToolUse(TOOLS, form, ()).grammar(byte_level(), {"type": "object", "x-guidance": options})
    assert grammar is not None
    if valid:
        start(grammar)
    else:
        with pytest.raises(InvalidRequestError):
            start(grammar)


@pytest.mark.parametrize("form", list(ToolForm))
@pytest.mark.parametrize("answer", [None, {"type": "object"}])
def test_a_refused_schema_is_named_by_its_tool(form: ToolForm, answer: dict[str, Any] | None) -> None:
    wrong = {"type": "object", "properties": {"a": {"type": "strin"}}}
    tools = [TOOLS[0], {"function": {"name": "find.it", "parameters": wrong, "strict": True}}]
    grammar = ToolUse(tools, form, () if answer else ("look", "find.it")).grammar(byte_level(), answer)
    assert grammar is not None
    with pytest.raises(InvalidRequestError) as caught:
        start(grammar)
    (violation,) = caught.value.violations
    assert violation.description == "the schema of find.it: Invalid type: strin; correct or simplify the schema"


def test_a_count_of_arguments_that_no_grammar_limits_forbids_none_of_them() -> None:
    some = {"properties": {"kind": KIND, "at": {"type": "boolean"}}, "additionalProperties": True, "minProperties": 1}
    use = ToolUse([{"function": {"name": "look", "parameters": some}}], ToolForm.LLAMA, ("look",), parallel=False)
    grammar = use.grammar(byte_level())
    assert grammar is not None
    found = start(grammar)
    commit(found, '{"name": "look", "parameters": {"kind": "near"}}')
    assert finished(found)
