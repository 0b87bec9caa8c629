"""The tools of a request: reading them, the grammar of an answer that must call them, and how its text is read."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, chain
from typing import Any

import orjson

from server.http.answer_parser import AnswerParser, Part, ThoughtMarks
from server.http.tool_parameters import MAX_NAME, MOST_VALUES, SPACING, ParameterGrammar, count_values, unenforced
from server.json_body import GRAMMAR_FIELD, Body, RequestFields, write_json
from server.json_schemas import closed, lenient, without_notes
from server.request_fields import FLAG, OBJECT, TEXT, Field, Table, either, listed, with_fields
from specdec.core.fields import MAX_TOOLS
from specdec.core.types import JSON_WHITESPACE, GrammarKind, GrammarParams
from specdec.engine.validation import MAX_SCHEMA_BYTES
from specdec.models.tokenizer import Tokenizer
from specdec.models.tool_forms import ToolForm

_NAME = re.compile(rf'[^\s<>{{}}\[\]"\\]{{1,{MAX_NAME}}}')
NAME_RULE = f"must be 1 to {MAX_NAME} characters, no white space, quotes, backslashes, angle, square or curly brackets"
_CHOICE_RULE = 'must be "auto", "none", "required", or an object of type "function" with the name of a tool'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """The tools of a request."""

    tools: list[dict[str, Any]]  # in OpenAI's form, for the chat template
    form: ToolForm  # of calls in the model's text
    required: tuple[str, ...] = ()  # names of tools; the answer consists of calls of these. Empty: any answer
    parallel: bool = True  # more than one call is allowed

    def bound(self, answer: Mapping[str, Any] | None) -> list[dict[str, Any]]:
        """The functions of which calls must follow the schemas. answer: as in `grammar`."""
        functions = [tool["function"] for tool in self.tools]
        if self.required:
            return [each for each in functions if each["name"] in self.required]
        if self.form is ToolForm.LLAMA and answer is None:
            return []  # its calls have no mark, by which a grammar knows where free text ends
        return [each for each in functions if each.get("strict") is True]

    def grammar(self, tokenizer: Tokenizer, answer: Mapping[str, Any] | None = None) -> GrammarParams | None:
        """The grammar of the answer, in llguidance's Lark: calls of required tools, or text and calls. In the latter,
        arguments follow the schemas of ``strict`` tools, and are any object for others. None: the answer is free.

        answer: the schema of an answer without calls, where none is required; there is then no text beside calls.
        """
        form, is_free, is_llama = self.form, not self.required, self.form is ToolForm.LLAMA
        bound = self.bound(answer)
        if answer is None and not bound:
            return None
        # Llama's templates refuse to write down a message with two calls.
        many = self.parallel and not is_llama
        functions = [tool["function"] for tool in self.tools] if is_free else bound
        schemas = [
            _schema(each.get("parameters")) if not is_free or each.get("strict") is True else {"type": "object"}
            for each in functions
        ]
        special = {mark: token for mark in _MARKS if (token := tokenizer.special_id(mark)) is not None}
        marked = partial(_marked, special)
        mark, opening, closing, between = _AROUND[form]
        more = f"({marked(between)} call)*" if many else ""
        calls = [
            f"calls: {marked(opening)} call {more} {marked(closing)}",
            "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
        ]
        parameters = ParameterGrammar()
        for i, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
            before, after = _call(form, function["name"])
            calls.append(f"call_{i}: {marked(before)} arguments_{i} {marked(after)}")
            if form is ToolForm.QWEN_XML:
                parameters.add(f"arguments_{i}", schema, _comment(function))
            else:
                calls += [_comment(function), f"arguments_{i}: %json {json.dumps({**schema, 'x-guidance': SPACING})}"]
        if form is ToolForm.QWEN_XML:
            calls += parameters.rules
        if not is_free:
            rules = [f"start: {marked(mark)} calls", *calls]
        elif answer is None:
            kind = "" if mark in special else "[lazy]"
            start = "(marked calls)* TEXT" if many else "marked calls | TEXT"
            rules = [f"start: {start}", f"marked{kind}: TEXT {marked(mark)}", r"TEXT: /(.|\n)*/", *calls]
        else:
            start = "answer" if is_llama else f"{marked(mark)} calls | answer"
            rules = [] if is_llama else calls
            answer = _with_spacing(answer)
            if form in _BARE:
                start += " | bare"
                options = answer["x-guidance"]  # one that is no object is refused with the grammar
                rules += _bare_calls(_BARE[form], functions, schemas, options if isinstance(options, dict) else {})
            rules = [f"start: {start}", f"answer: %json {json.dumps(answer)}", *rules]
        return GrammarParams(GrammarKind.EBNF, "\n".join(rules), of_schemas=True)


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """What the text of an answer may hold beside the answer."""

    tools: ToolUse | None = None  # that the model knows, so that it may call them
    thoughts: ThoughtMarks | None = None

    def parser(self, *, whole: bool = False) -> AnswerParser:
        """A parser of one sample. whole: a call comes in one piece."""
        if self.tools is None:
            return AnswerParser(None, {}, thoughts=self.thoughts)
        schemas = {tool["function"]["name"]: tool["function"].get("parameters") or {} for tool in self.tools.tools}
        max_calls = None if self.tools.parallel else 1
        return AnswerParser(self.tools.form, schemas, max_calls, whole=whole, thoughts=self.thoughts)

    def parse(self, text: str, token_ids: Sequence[int] = ()) -> tuple[list[Part], int]:
        """The thoughts, the text and the whole calls of a complete answer, in order, and the number of its tokens that
        are thoughts."""
        parser = self.parser(whole=True)
        return [*parser.push(text, token_ids), *parser.flush()], parser.thought_tokens


_CALL_MARKS = {
    ToolForm.HERMES: ("<tool_call>",),
    ToolForm.LLAMA: ("<|python_tag|>",),
    ToolForm.MISTRAL: ("[TOOL_CALLS]",),
    ToolForm.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]"),
    ToolForm.QWEN_XML: ("<tool_call>",),
}


@dataclass(frozen=True, slots=True)
class FlatTools:
    """A dialect's tools without an object ``function`` around their fields."""

    kinds: tuple[str | None, ...]
    """Types that are served. Agents also list tools that only the API's own maker can run."""
    schema: str  # the field with the schema of the arguments


def read_tools(body: Body, tokenizer: Tokenizer, flat: FlatTools | None = None) -> ToolUse | None:
    """``tools``, ``tool_choice`` and ``parallel_tool_calls``. None: there are none, or a field is wrong.

    flat: None: the tools are those of OpenAI's chat.
    """
    n_known = len(body.violations.found)
    tools: list[dict[str, Any]] = []
    names: dict[str, int] = {}  # name -> place in the body
    for i, given in enumerate(body.objects("tools", MAX_TOOLS)):
        if flat is not None and given.text("type") not in flat.kinds:
            body.warn(f"tools[{i}]", "is not served here, and was ignored")
            continue
        function = given.object("function") if flat is None else given
        if function is None:
            given.refuse("function", "must be an object with a name; tools of other types are not served")
            continue
        name = _read_function(function, "parameters" if flat is None else flat.schema)
        if names.setdefault(name, i) < i and name:
            function.refuse("name", f"{name} is the name of tools[{names[name]}] too")
        tools.append(body.raw("tools")[i] if flat is None else _in_chat(given, name, flat.schema))
    if len(body.violations.found) > n_known:
        return None  # a choice among tools that are wrong cannot be judged
    choice = body.object("tool_choice") if isinstance(body.raw("tool_choice"), dict) else None
    allowed: Collection[str] = names
    required: tuple[str, ...] | None
    if names and choice is not None and choice.raw("type") == "allowed_tools":
        allowed, forced = _read_allowed(choice, names)
        required, choice = (allowed if forced else ()), None
    else:
        required = _read_choice(body, choice, names)
    parallel = body.flag("parallel_tool_calls", default=True)
    if not names or required is None or len(body.violations.found) > n_known:
        return None
    tools = [tool for tool in tools if tool["function"]["name"] in allowed]
    # A named function is called once.
    return ToolUse(tools, tokenizer.tool_form, required, parallel and choice is None)


def answer_form(
    body: Body, fields: RequestFields, tools: ToolUse | None, tokenizer: Tokenizer, prompt_ids: Sequence[int]
) -> AnswerForm:
    """What the text of the answer will hold. Sets the grammar that calls must match, and whether the text shows the
    special tokens that mark calls and thoughts."""
    is_bound = fields.engine.get(GRAMMAR_FIELD) is not None or (tools is not None and bool(tools.required))
    if tools is not None and not body.violations.found:  # else schemas may be nested too deep to go on with
        _use_tools(body, fields, tools, tokenizer)
    thoughts: ThoughtMarks | None = None  # an answer that is bound to a grammar has none
    marks = tokenizer.thought_marks
    if marks is not None and not is_bound:
        opening, closing, _ = marks
        if tokenizer.special_ids.intersection((opening, closing)):
            fields.engine["output.skip_special_tokens"] = False
        if fields.own.get("separate_reasoning", True):
            before, after = (tokenizer.token_bytes(mark).decode() for mark in (opening, closing))
            thoughts = ThoughtMarks(before, after, closing, tokenizer.leaves_thoughts_open(prompt_ids))
    return AnswerForm(tools, thoughts)


def _use_tools(body: Body, fields: RequestFields, tools: ToolUse, tokenizer: Tokenizer) -> None:
    if any(tokenizer.special_id(mark) is not None for mark in _CALL_MARKS[tools.form]):
        fields.engine["output.skip_special_tokens"] = False
    given: GrammarParams | None = fields.engine.get(GRAMMAR_FIELD)
    answer = None if given is None else _answer_schema(given)
    if given is not None and tools.required:
        form = body.names[GRAMMAR_FIELD]
        body.warn(form, "has no effect, because tool_choice lets nothing but calls be answered")
        given = answer = None
    bound = tools.bound(answer)
    if given is not None and answer is None:
        body.warn("tools", "cannot be called, because the whole answer has another form; only JSON goes with tools")
    elif any(total > 2 * MAX_SCHEMA_BYTES for total in accumulate(map(_size, bound))):
        # Reading them would take seconds in which nothing else is served, and end in this refusal.
        body.refuse("tools", f"the schemas that calls must follow exceed {MAX_SCHEMA_BYTES} bytes; simplify them")
    elif tools.form is ToolForm.QWEN_XML and any(total > MOST_VALUES for total in accumulate(_values(bound))):
        body.refuse("tools", f"parameters of calls have over {MOST_VALUES} alternatives and references; simplify them")
    elif (grammar := tools.grammar(tokenizer, answer)) is not None:
        if given is None:
            body.names[GRAMMAR_FIELD] = body.path("tools")
        for function in bound:
            schema = function.get("parameters") or {}
            in_tags = unenforced(schema) if tools.form is ToolForm.QWEN_XML else ""
            for warning in filter(None, (lenient(closed(schema))[1], in_tags)):
                body.warn("tools", f"the schema of {function['name']}: {warning}")
        fields.engine[GRAMMAR_FIELD] = grammar


def _size(function: Mapping[str, Any]) -> int:
    """Bytes of the schema of a function's arguments, as far as a grammar uses it."""
    return len(write_json(without_notes(function.get("parameters") or {})))


def _values(functions: Sequence[Mapping[str, Any]]) -> Iterator[int]:
    return chain.from_iterable(count_values(function.get("parameters") or {}) for function in functions)


def _answer_schema(form: GrammarParams) -> dict[str, Any] | None:
    """The JSON schema of answers of ``form``; None: they are no JSON, or it is wrong or too long, and is refused."""
    if form.kind is GrammarKind.JSON_OBJECT:
        return {"type": "object"}
    if form.kind is not GrammarKind.JSON_SCHEMA or len(form.text) > MAX_SCHEMA_BYTES:
        return None
    try:
        schema = orjson.loads(form.text)
    except orjson.JSONDecodeError:
        return None
    return schema if isinstance(schema, dict) else None


def _read_function(function: Body, schema: str) -> str:
    """The name of a tool; empty: it is wrong. schema: the field with the schema of the arguments."""
    name = function.text("name") or ""
    if function.raw("name") in (None, name):  # else it is no string
        function.violations.check(bool(_NAME.fullmatch(name)), function.path("name"), NAME_RULE)
    function.text("description")
    function.flag("strict")
    parameters = function.object(schema)
    if parameters is not None and parameters.raw("type") not in (None, "object"):
        parameters.refuse("type", 'must be "object"')
    if parameters is not None:
        parameters.object("properties")
    return name


def _in_chat(given: Body, name: str, schema: str) -> dict[str, Any]:
    """A flat tool in the form of OpenAI's chat, which templates expect."""
    fields = {"description": "description", "parameters": schema, "strict": "strict"}
    known = {field: given.raw(own) for field, own in fields.items() if given.has(own)}
    return {"type": "function", "function": {"name": name, **known}}


def _read_choice(body: Body, given: Body | None, names: Collection[str]) -> tuple[str, ...] | None:
    """The tools of which one must be called; None: no tool may be called. given: the choice, if it is an object."""
    choice = body.raw("tool_choice")
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return ()
    is_named = given is not None and given.raw("type") in ("function", None)  # TGI's clients send no type
    if not names:
        body.refuse("tool_choice", "needs tools that can be called; add tools, or leave it out")
    elif not is_named and choice not in ("required", "any"):  # the latter is Mistral's word for the former
        body.refuse("tool_choice", _CHOICE_RULE)
    else:
        return tuple(names) if given is None else (_read_name(given, names),)
    return ()


def _read_name(given: Body, names: Collection[str]) -> str:
    """The tool that ``given`` names, beside its type as in OpenAI's Responses, or in an object ``function``."""
    function = given.object("function") if given.has("function") else given
    if function is None:
        return ""
    name = function.needed_text("name")
    if isinstance(function.raw("name"), str) and name not in names:
        function.refuse("name", f"{name[:64]!r} is none of the tools: {', '.join(names)}")
    return name


def _read_allowed(choice: Body, names: Collection[str]) -> tuple[tuple[str, ...], bool]:
    """The tools that may be called, and whether one must be. OpenAI's Responses have no object ``allowed_tools`` around
    them."""
    given = choice.object("allowed_tools") if choice.has("allowed_tools") else choice
    if given is None:
        return (), False
    mode = given.text("mode")
    if mode not in ("auto", "required"):
        given.refuse("mode", "must be auto or required")
    # The answer warns of tools that are not served.
    served = [tool for tool in given.objects("tools", MAX_TOOLS) if tool.raw("type") in (None, "function")]
    if not served:
        given.refuse("tools", "must name at least one of the tools; leave tool_choice out to allow all")
    return tuple(dict.fromkeys(_read_name(tool, names) for tool in served)), mode == "required"


_ALLOWED = with_fields({"mode": {"enum": ["auto", "required"]}, "tools": listed(OBJECT)})
_FUNCTION = with_fields(
    {
        "name": {**TEXT, "minLength": 1},
        "description": TEXT,
        "parameters": {**OBJECT, "description": "A JSON schema."},
        "strict": FLAG,
    },
    "name",
)
PARALLEL = Field("parallel_tool_calls", {**FLAG, "default": True, "description": "False: at most one call."})
TOOLS: Table = (
    Field("tools", listed(with_fields({"type": {"enum": ["function"]}, "function": _FUNCTION}))),
    Field(
        "tool_choice",
        either(
            {"enum": ["auto", "none", "required", "any"]},
            {
                **with_fields({"type": {"enum": ["function"]}, "function": with_fields({"name": TEXT})}, "function"),
                "description": "The one to call.",
            },
            {
                **with_fields({"type": {"enum": ["allowed_tools"]}, "allowed_tools": _ALLOWED}, "allowed_tools"),
                "description": "The only ones that may be called.",
            },
        ),
    ),
    PARALLEL,
)


def _comment(function: Mapping[str, Any]) -> str:
    """Stands above a schema, and in the compiler's error about it."""
    return f"// the schema of {function['name']}"


# By form: the mark of the first call, the text after it, the text after the last call, and that between two calls.
_AROUND: Mapping[ToolForm, tuple[str, str, str, str]] = {
    ToolForm.HERMES: ("<tool_call>", "\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n"),
    ToolForm.LLAMA: ("", "", "", "; "),
    ToolForm.MISTRAL: ("[TOOL_CALLS]", "[", "]", ", "),
    ToolForm.MISTRAL_ARGS: ("[TOOL_CALLS]", "", "", "[TOOL_CALLS]"),
    ToolForm.QWEN_XML: ("<tool_call>", "\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n"),
}


def _call(form: ToolForm, name: str) -> tuple[str, str]:
    """The text before and after the arguments."""
    if form is ToolForm.MISTRAL_ARGS:
        return f"{name}[ARGS]", ""
    if form is ToolForm.QWEN_XML:
        return f"<function={name}>\n", ""
    key = "parameters" if form is ToolForm.LLAMA else "arguments"
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ', "}"


_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")


def _schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """The schema without further fields, unless it mentions them."""
    return {"type": "object", **without_notes(lenient(closed(parameters or {"properties": {}}))[0])}


def _with_spacing(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The schema of an answer, with the white space that a grammar of its own would have."""
    own = schema.get("x-guidance") or {}
    if isinstance(own, dict) and own.get("whitespace_flexible") is not False:
        own = {"whitespace_pattern": JSON_WHITESPACE, **own}
    return {**without_notes(schema), "x-guidance": own}


# Forms in which a call may be an object alone, with the name of its arguments: small models leave Hermes' mark out.
# Such a call and a JSON answer both begin with a brace, so the lexer must read them by the same rules.
_BARE = {ToolForm.HERMES: "arguments", ToolForm.LLAMA: "parameters"}


def _bare_calls(
    key: str, functions: Sequence[Mapping[str, Any]], schemas: Sequence[Mapping[str, Any]], options: Mapping[str, Any]
) -> list[str]:
    """Rules of a call that is an object alone. ``key``: of its arguments. ``options``: the library's."""
    rules = ["bare: " + " | ".join(f"bare_{i}" for i in range(len(functions)))]
    for i, (function, schema) in enumerate(zip(functions, schemas, strict=True)):
        # With an id, references inside of the arguments' schema start at its own root.
        fields = {"name": {"const": function["name"]}, key: {"$id": f"urn:tool:{i}", **schema}}
        whole = {"type": "object", "properties": fields, "required": [*fields], "additionalProperties": False}
        rules += [
            _comment(function),
            f"bare_{i}: %json {json.dumps(whole | {'x-guidance': {**options, 'lenient': True}})}",
        ]
    return rules


def _marked(special: Mapping[str, int], text: str) -> str:
    """``text`` as a sequence of literals, special tokens by their ids, which ``special`` has by their marks."""
    for mark, token in special.items():
        before, found, after = text.partition(mark)
        if found:
            return " ".join(filter(None, (_marked(special, before), f"<[{token}]>", _marked(special, after))))
    return json.dumps(text, ensure_ascii=False) if text else ""
