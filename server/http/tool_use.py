"""What a request says of tools: those the model is told of, and what its answer must call."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from server.http.tool_calls import MAX_NAME, ToolCall, ToolCallParser, WholeCallParser
from server.http.tool_grammar import MARKED, tool_grammar
from server.interfaces import TokenizerLike
from server.json_body import Body
from specdec.core.types import GrammarKind, GrammarParams, OutputParams
from specdec.models.tool_forms import ToolForm

_NAME = re.compile(rf'[^\s<>{{}}\[\]"\\]{{1,{MAX_NAME}}}')
NAME_RULE = (
    f"must be at most {MAX_NAME} characters, no white space, quotes, backslashes, angle, square or curly brackets"
)
_CHOICES = {"auto", "none", "required", "any"}  # the last is Mistral's word for "required"
_CHOICE_RULE = 'must be "auto", "none", "required" or {"type": "function", "function": {"name": "..."}}'


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools``, as OpenAI describes them, go to the chat template, and the model's text may hold calls of them.

    ``required``: names of the tools of which the answer must call one, and consists of such calls; empty: it is free.
    ``parallel``: there may be more than one call.
    """

    tools: list[dict[str, Any]]
    form: ToolForm
    required: tuple[str, ...] = ()
    parallel: bool = True

    @property
    def names(self) -> tuple[str, ...]:
        """Of all tools."""
        return tuple(tool["function"]["name"] for tool in self.tools)

    def parser(self) -> ToolCallParser:
        """Reads one sample of a streamed answer."""
        return ToolCallParser(self.form, self.names, None if self.parallel else 1)

    def whole_parser(self) -> WholeCallParser:
        """Reads one sample where calls are told whole."""
        return WholeCallParser(self.form, self.names, None if self.parallel else 1)

    def parse(self, text: str) -> list[str | ToolCall]:
        """A whole answer as text and calls, in order."""
        parser = self.whole_parser()
        return [*parser.push(text), *parser.flush()]

    def grammar(self, tokenizer: TokenizerLike) -> GrammarParams | None:
        """What the answer must match: calls of what is required, or schemas where ``strict`` tools are called."""
        functions = [tool["function"] for tool in self.tools]
        free = not self.required
        if free and not (self.form in MARKED and any(function.get("strict") for function in functions)):
            return None
        callable_ = [function for function in functions if free or function["name"] in self.required]
        # Llama's templates refuse to write down a message with two calls.
        many = self.parallel and self.form is not ToolForm.LLAMA
        text = tool_grammar(self.form, callable_, tokenizer, many=many, free=free)
        return GrammarParams(GrammarKind.EBNF, text)

    def output(self, output: OutputParams, tokenizer: TokenizerLike) -> OutputParams:
        """``output``, with special tokens in the text where marks of the form are such."""
        if all(tokenizer.special_id(mark) is None for mark in _MARKS.get(self.form, ())):
            return output
        return replace(output, skip_special_tokens=False)


_MARKS = {
    ToolForm.HERMES: ("<tool_call>",),
    ToolForm.LLAMA: ("<|python_tag|>",),
    ToolForm.MISTRAL: ("[TOOL_CALLS]",),
    ToolForm.MISTRAL_ARGS: ("[TOOL_CALLS]", "[ARGS]"),
}


def read_tools(body: Body, tokenizer: TokenizerLike) -> ToolUse | None:
    """OpenAI's ``tools``, ``tool_choice`` and ``parallel_tool_calls``; None: the model is told of no tools, or they are
    bad, which is noted."""
    n_known = len(body.violations.found)
    tools: list[dict[str, Any]] = body.value("tools")
    names = [_read_tool(tool) for tool in body.objects("tools")]
    check_names(body, names, "tools", "function.name")
    required = _read_choice(body, names)
    parallel = body.flag("parallel_tool_calls", default=True)
    if not names or required is None or len(body.violations.found) > n_known:
        return None
    # A named function is called once.
    single = isinstance(body.raw("tool_choice"), dict)
    return ToolUse(tools, tokenizer.tool_form, required, parallel and not single)


def answer_grammar(
    body: Body, own: GrammarParams | None, tools: ToolUse | None, tokenizer: TokenizerLike
) -> GrammarParams | None:
    """What an answer must match that should match ``own`` too; that it can not is noted."""
    if tools is None or (own is not None and not tools.required):
        return own
    if own is not None:
        body.refuse("tool_choice", "lets nothing but calls be answered, and a form for the answer is given too")
    body.names["grammar"] = body.path("tools")
    return tools.grammar(tokenizer)


def check_names(body: Body, names: Sequence[str], field: str, key: str) -> None:
    """Note names that are there twice; ``field`` holds the tools, each with its name at ``key``."""
    first: dict[str, int] = {}
    for i, name in enumerate(names):
        if name and first.setdefault(name, i) < i:
            body.refuse(f"{field}[{i}].{key}", f"{name} is the name of {field}[{first[name]}] too")


def _read_tool(tool: Body) -> str:
    """Its name; empty where it is bad."""
    function = tool.object("function")
    name = None if function is None else function.text("name")
    if function is None or not name:
        tool.refuse("function", "must be an object with a name")
        return ""
    check_tool(function, name, "parameters")
    function.flag("strict")
    return name


def check_tool(function: Body, name: str, schema: str) -> None:
    """Note what is wrong with a tool's name, and with the JSON schema of its arguments in the field ``schema``."""
    function.violations.check(bool(_NAME.fullmatch(name)), function.path("name"), NAME_RULE)
    function.text("description")
    parameters = function.object(schema)
    if parameters is not None and parameters.raw("type") not in (None, "object"):
        parameters.refuse("type", 'must be "object"')
    if parameters is not None:
        parameters.object("properties")


def _read_choice(body: Body, names: Sequence[str]) -> tuple[str, ...] | None:
    """The tools one of which must be called; None: none may be."""
    choice = body.raw("tool_choice")
    if choice == "none":
        return None
    if choice is None or choice == "auto":
        return ()
    if not isinstance(choice, dict):
        if not isinstance(choice, str) or choice not in _CHOICES:
            body.refuse("tool_choice", _CHOICE_RULE)
        elif not names:
            body.refuse("tool_choice", "needs tools that can be called; add tools, or leave it out")
        return tuple(names)
    given = body.object("tool_choice")
    function = None if given is None or given.raw("type") != "function" else given.object("function")
    name = None if function is None else function.text("name")
    if function is None or not name:
        body.refuse("tool_choice", _CHOICE_RULE)
    elif not names:
        body.refuse("tool_choice", "needs tools that can be called; add tools, or leave it out")
    elif name not in names:
        function.refuse("name", f"{name} is none of the tools: {', '.join(filter(None, names))}")
    else:
        return (name,)
    return ()
