"""Renders chat messages with a model's own template, in a sandbox: templates come from downloaded files."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from itertools import groupby
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import InvalidRequestError, ModelError, ViolationCollector


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` in the form that templates expect.

    Each content is one text, and thoughts are a ``reasoning_content``. A ``function_call`` is a tool call. Arguments of
    tool calls are objects. Results of calls carry the ``name`` of the function, and stand in the order of their calls:
    many templates leave out ids.

    Raises:
        InvalidRequestError: a content is neither text nor a list of text parts; names every such content.
    """
    violations = ViolationCollector()
    plain: list[dict[str, Any]] = []
    called: dict[str, Any] = {}  # names of functions by the ids of calls
    for i, message in enumerate(messages):
        copy = {**message, "content": _text(message.get("content"), f"messages[{i}].content", violations)}
        for field in ("reasoning", "thinking"):  # of vLLM and Ollama
            if isinstance(thoughts := message.get(field), str) and copy.get("reasoning_content") is None:
                copy["reasoning_content"] = thoughts
        former = copy.pop("function_call", None)  # OpenAI's form of a single call
        if isinstance(former, Mapping) and not message.get("tool_calls"):
            copy["tool_calls"] = [_call({"type": "function", "function": former})]
        elif isinstance(calls := message.get("tool_calls"), list):
            copy["tool_calls"] = [_call(call) for call in calls]
            for call in calls:
                if isinstance(call, Mapping) and isinstance(call.get("id"), str):
                    called[call["id"]] = _function(call).get("name")
        if not copy.get("tool_calls"):  # templates ask whether the field is there
            copy.pop("tool_calls", None)
        if message.get("role") == "tool" and not message.get("name"):
            # Some templates refuse a result without a name, for which OpenAI's API has no field.
            name = message.get("tool_name") or called.get(str(message.get("tool_call_id")))
            copy |= {} if name is None else {"name": name}
        plain.append(copy)
    violations.raise_if_any()
    return _in_order_of_calls(plain)


def _in_order_of_calls(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for are_results, run in groupby(messages, lambda message: message.get("role") == "tool"):
        together = list(run)
        calls = found[-1].get("tool_calls") if are_results and found else None
        ids = [call.get("id") for call in calls if isinstance(call, Mapping)] if isinstance(calls, list) else []
        if all(each.get("tool_call_id") in ids for each in together):
            together.sort(key=lambda each: ids.index(each.get("tool_call_id")))
        found += together
    return found


def _text(content: Any, path: str, violations: ViolationCollector) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        violations.check(False, path, "must be text or a list of text parts")
        return ""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    for i, text in enumerate(texts):
        rule = 'must be a text part, {"type": "text", "text": "..."}; the model reads nothing else'
        violations.check(isinstance(text, str), f"{path}[{i}]", rule)
    return "\n".join(text for text in texts if isinstance(text, str))


def _function(call: Mapping[str, Any]) -> Mapping[str, Any]:
    function = call.get("function")
    return function if isinstance(function, Mapping) else {}


# An escape in JSON. Without a group: half of a surrogate pair, which models may write and tokenizers refuse.
_ESCAPE = re.compile(r"\\(?:(u[dD][89abAB]\w\w\\u[dD][c-fC-F]\w\w|[^u])|u[dD][89a-fA-F]\w\w)")


def _call(call: Any) -> Any:
    function = _function(call) if isinstance(call, Mapping) else {}
    try:
        text = _ESCAPE.sub(lambda found: found[0] if found[1] else r"\ufffd", function["arguments"])
        arguments = json.loads(text)
    except (LookupError, TypeError, ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


class GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a scope of its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class ChatTemplate:
    """A compiled chat template.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str]) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except Exception as error:  # also of Python, such as a SyntaxError in the code that Jinja makes of it
            raise ModelError(f"the model's chat template cannot be compiled: {error}; send a plain prompt") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        variables: Mapping[str, Any] | None = None,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of ``messages``; InvalidRequestError when the template refuses them. variables: further ones;
        ``add_generation_prompt`` is true without them."""
        every = self._variables | {"add_generation_prompt": True, "documents": None} | dict(variables or {})
        try:
            return self._template.render(every | {"messages": messages, "tools": tools or None})
        except Exception as error:  # whatever its expressions raise, such as a KeyError or a MemoryError
            problem = f"the model's chat template refused them: {str(error) or type(error).__name__}"
            raise InvalidRequestError.of("messages", problem) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which would change the prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
