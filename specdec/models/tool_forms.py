"""How models write tool calls into their text, by their chat templates.

A model whose template has no tools gets them in a system message, in the form `ToolForm.HERMES`.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any


class ToolForm(StrEnum):
    """The text of one call, in which ``ARGS`` is a JSON object."""

    HERMES = "hermes"
    """``<tool_call>{"name": "f", "arguments": ARGS}</tool_call>``; Qwen's too."""
    LLAMA = "llama"
    """``{"name": "f", "parameters": ARGS}`` at the answer's beginning or behind ``<|python_tag|>``."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS][{"name": "f", "arguments": ARGS}]``, one list of all calls."""
    MISTRAL_ARGS = "mistral-args"
    """``[TOOL_CALLS]f[ARGS]ARGS``."""
    QWEN_XML = "qwen-xml"
    """``<tool_call><function=f><parameter=KEY>VALUE</parameter></function></tool_call>``, of Qwen3-Coder, Qwen3.5 and
    3.6: strings as they are, other values as JSON."""


# A template's form is the first whose signs it holds all. None: a form that is not supported.
_SIGNS: tuple[tuple[tuple[str, ...], ToolForm | None], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), ToolForm.MISTRAL_ARGS),
    (("[TOOL_CALLS]",), ToolForm.MISTRAL),
    ((">>>",), None),  # Functionary
    (("<tool_call>", "<function=", "<parameter="), ToolForm.QWEN_XML),
    (("<function=",), None),  # another of Functionary's
    (("<arg_key>",), None),  # GLM
    (("<tool_call>",), ToolForm.HERMES),
    (("<|python_tag|>",), ToolForm.LLAMA),
    (("ipython", '"parameters": '), ToolForm.LLAMA),
)


def tool_form(template: str) -> ToolForm | None:
    """The form in which a chat template (Jinja source) writes calls; None if it is not supported or has no tools."""
    if "tools" not in template:
        return None
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)


def fit_calls(messages: list[dict[str, Any]], form: ToolForm) -> list[dict[str, Any]]:
    """``messages`` with their calls as templates of ``form`` take them: Mistral's refuse ids that are not nine letters
    and digits, Llama's more than one call in a message, Qwen's arguments that are no object."""
    if form in (ToolForm.MISTRAL, ToolForm.MISTRAL_ARGS):
        return _with_short_ids(messages)
    if form is ToolForm.QWEN_XML:
        return [
            {**each, "tool_calls": [*map(_with_object, calls)]} if (calls := _calls(each)) else each
            for each in messages
        ]
    return _with_single_calls(messages) if form is ToolForm.LLAMA else messages


def _calls(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    calls = message.get("tool_calls")
    return [dict(call) for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []


def _with_object(call: Mapping[str, Any]) -> dict[str, Any]:
    """``call`` with arguments that are an object; others, such as those of a call cut off, are wrapped in one."""
    function = call.get("function")
    if not isinstance(function, Mapping) or isinstance(arguments := function.get("arguments"), Mapping):
        return dict(call)
    return {**call, "function": {**function, "arguments": {"value": arguments} if arguments else {}}}


def _with_short_ids(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    waiting: list[str] = []  # ids of calls without a result: a result without an id answers the first
    for i, message in enumerate(messages):
        if calls := _calls(message):
            named = [{**call, "id": _short_id(call.get("id") or f"{i}.{j}")} for j, call in enumerate(calls)]
            waiting = [call["id"] for call in named]
            message = {**message, "tool_calls": named}
        elif message.get("role") == "tool":
            given = message.get("tool_call_id")
            known = _short_id(given) if given else next(iter(waiting), _short_id(str(i)))
            waiting = [each for each in waiting if each != known]
            message = {**message, "tool_call_id": known}
        found.append(message)
    return found


def _short_id(given: Any) -> str:
    text = str(given)
    return text if re.fullmatch("[A-Za-z0-9]{9}", text) else hashlib.sha256(text.encode()).hexdigest()[:9]


def _with_single_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    left = messages[::-1]
    while left:
        message = left.pop()
        calls = _calls(message)
        if len(calls) < 2:
            found.append(message)
            continue
        results = []
        while left and left[-1].get("role") == "tool":
            results.append(left.pop())
        for number, call in enumerate(calls):
            found.append({**message, "content": "" if number else message.get("content", ""), "tool_calls": [call]})
            wanted = call.get("id")
            own = next((i for i, each in enumerate(results) if each.get("tool_call_id", wanted) == wanted), None)
            if own is not None:
                found.append(results.pop(own))
        found += results
    return found


_OPENING = "You can call these functions, each on a line of its own with the JSON schema of its arguments:"
_RULE = """To call one, answer with nothing but its name and its arguments in this form:
<tool_call>
{"name": "...", "arguments": {...}}
</tool_call>"""


def without_tools(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None
) -> list[dict[str, Any]]:
    """``messages`` for a template without tools: tools, calls and results become text.

    They go into the system's, the assistant's and the user's messages. Consecutive results become one user message,
    with the user's text after them, because many templates require roles to alternate. Contents must be text.
    """
    found: list[dict[str, Any]] = []
    after_result = False
    for message in messages:
        is_result = message.get("role") == "tool"
        plain = _result(message) if is_result else _without_calls(message)
        if after_result and plain.get("role") == "user":
            found[-1]["content"] += "\n" + plain["content"]
        else:
            found.append(plain)
        after_result = is_result
    if tools:
        text = "\n".join([_OPENING, *(json.dumps(tool.get("function"), ensure_ascii=False) for tool in tools), _RULE])
        if found and found[0].get("role") == "system":
            found[0]["content"] = "\n\n".join(filter(None, (found[0]["content"], text)))
        else:
            found.insert(0, {"role": "system", "content": text})
    return found


def _result(message: Mapping[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": f"<tool_response>\n{message['content']}\n</tool_response>"}


def _without_calls(message: Mapping[str, Any]) -> dict[str, Any]:
    copy = {key: value for key, value in message.items() if key != "tool_calls"}
    calls = message.get("tool_calls")
    if isinstance(calls, list) and calls:
        copy["content"] = "\n".join(filter(None, [copy["content"], *map(_call, calls)]))
    return copy


def _call(call: Any) -> str:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return ""
    said = {"name": function.get("name"), "arguments": function.get("arguments")}
    return f"<tool_call>\n{json.dumps(said, ensure_ascii=False)}\n</tool_call>"
