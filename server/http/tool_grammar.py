"""The grammar of an answer that must call tools, in llguidance's Lark dialect."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from server.interfaces import TokenizerLike
from specdec.models.tool_forms import ToolForm

# As Python's json writes, which templates write calls with: what the model has seen most, and all of it is forced.
_SPACING = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


def tool_grammar(
    form: ToolForm, functions: Sequence[Mapping[str, Any]], tokenizer: TokenizerLike, *, many: bool, free: bool = False
) -> str:
    """An answer that is calls of ``functions``, as OpenAI describes them: each with ``name`` and ``parameters``, a JSON
    schema. ``many``: more than one may come. ``free``: text may come too, or nothing but text; then arguments follow
    the schemas of functions that are ``strict``, and are any object for the others."""
    writer = _Writer(tokenizer)
    mark, opening, closing, between = _AROUND[form]
    more = f"({writer.marked(between)} call)*" if many else ""
    rules = [
        f"calls: {writer.marked(opening)} call {more} {writer.marked(closing)}",
        "call: " + " | ".join(f"call_{i}" for i in range(len(functions))),
    ]
    if not free:
        rules.insert(0, f"start: {writer.marked(mark)} calls")
    else:
        kind = "" if writer.is_special(mark) else "[lazy]"
        start = "(marked calls)* TEXT" if many else "marked calls | TEXT"
        rules = [f"start: {start}", f"marked{kind}: TEXT {writer.marked(mark)}", r"TEXT: /(.|\n)*/", *rules]
    for i, function in enumerate(functions):
        before, after = _call(form, function["name"])
        bound = not free or function.get("strict") is True
        schema = _schema(function.get("parameters")) if bound else {"type": "object", "x-guidance": _SPACING}
        rules += [
            f"call_{i}: {writer.marked(before)} arguments_{i} {writer.marked(after)}",
            f"arguments_{i}: %json {json.dumps(schema)}",
        ]
    return "\n".join(rules)


# The mark of the first call, what follows it, what stands behind the last call, and what between two.
_AROUND: Mapping[ToolForm, tuple[str, str, str, str]] = {
    ToolForm.HERMES: ("<tool_call>", "\n", "\n</tool_call>", "\n</tool_call>\n<tool_call>\n"),
    ToolForm.LLAMA: ("", "", "", "; "),
    ToolForm.MISTRAL: ("[TOOL_CALLS]", "[", "]", ", "),
    ToolForm.MISTRAL_ARGS: ("[TOOL_CALLS]", "", "", "[TOOL_CALLS]"),
    ToolForm.FUNCTIONARY: ("", "", "", ">>>"),
    ToolForm.FUNCTION_TAG: ("<function=", "", "", "<function="),
}
MARKED = frozenset(form for form, (mark, *_) in _AROUND.items() if mark)
"""Forms that calls and text can be told apart in by the first mark: those that `tool_grammar` takes ``free``."""


def _call(form: ToolForm, name: str) -> tuple[str, str]:
    """What stands around the arguments."""
    if form is ToolForm.MISTRAL_ARGS:
        return f"{name}[ARGS]", ""
    if form is ToolForm.FUNCTIONARY:
        return f"{name}\n", ""
    if form is ToolForm.FUNCTION_TAG:
        return f"{name}>", "</function>"
    key = "parameters" if form is ToolForm.LLAMA else "arguments"
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": ', "}"


_MARKS = ("[TOOL_CALLS]", "[ARGS]", "<tool_call>", "</tool_call>")
_COMBINED = ("allOf", "anyOf", "oneOf", "$ref", "patternProperties")


def _schema(parameters: Mapping[str, Any] | None) -> dict[str, Any]:
    """Fields beyond those described are left out, unless the schema speaks of them."""
    schema: dict[str, Any] = dict(parameters or {"type": "object", "properties": {}})
    if "properties" in schema and not any(key in schema for key in _COMBINED):
        schema = {"additionalProperties": False, **schema}
    return {"type": "object", **schema, "x-guidance": _SPACING}


class _Writer:
    def __init__(self, tokenizer: TokenizerLike) -> None:
        self._ids = {mark: found for mark in _MARKS if (found := tokenizer.special_id(mark)) is not None}

    def is_special(self, mark: str) -> bool:
        return mark in self._ids

    def marked(self, text: str) -> str:
        """``text`` as a sequence of literals, special tokens by their ids."""
        for mark, token in self._ids.items():
            before, found, after = text.partition(mark)
            if found:
                return " ".join(filter(None, (self.marked(before), f"<[{token}]>", self.marked(after))))
        return json.dumps(text, ensure_ascii=False) if text else ""
