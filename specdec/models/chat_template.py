"""Renders chat messages with a model's own template, in a sandbox: templates come from downloaded files."""

from __future__ import annotations

import functools
import json
import math
import re
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from specdec.errors import FieldViolation, InvalidRequestError, ModelError, ViolationCollector


def plain_messages(messages: Sequence[Mapping[str, Any]], *, text_arguments: bool = False) -> list[dict[str, Any]]:
    """``messages`` in the form that templates expect.

    Each content is one text. Arguments of tool calls are objects or, with ``text_arguments``, JSON text. Results of
    calls carry the ``name`` of the function.

    Raises:
        InvalidRequestError: a content is neither text nor a list of text parts; names every such content.
    """
    violations = ViolationCollector()
    plain: list[dict[str, Any]] = []
    called: dict[str, Any] = {}  # names of functions by the ids of calls
    for i, message in enumerate(messages):
        copy = {**message, "content": _text(message.get("content"), f"messages[{i}].content", violations)}
        if isinstance(calls := message.get("tool_calls"), list):
            copy["tool_calls"] = [_call(call, text_arguments) for call in calls]
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
    return plain


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


def _call(call: Any, text_arguments: bool) -> Any:
    function = _function(call) if isinstance(call, Mapping) else {}
    arguments = function.get("arguments")
    if text_arguments and isinstance(arguments, dict):
        return {**call, "function": {**function, "arguments": _to_json(arguments)}}
    if text_arguments or not isinstance(arguments, str):
        return call
    try:
        arguments = json.loads(arguments)
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


# Errors that a template's expressions raise on messages of an unexpected shape
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; renders as its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Parse the block into a scope of its body."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


MAX_TEXT = 1 << 24  # characters of a text that a template makes; as many bytes as a request's body may have
MAX_MADE = 1 << 28  # characters of all texts that one rendering makes; a template copies its messages a few times
MAX_WIDTH = 1 << 16  # of a padded text, or repetitions
MAX_BITS = 4096  # of an integer
MAX_RENDER_S = 5.0  # processor time of one rendering; a conversation of 16 MiB takes a fraction of a second
_STEPS_PER_LOOK = 16  # loop iterations, calls, filters and tests between looks at the clock, which cost about 1 us
_WIDE = re.compile(r"\d{6}|%[^a-zA-Z%]*\*")  # in a format string: a width above MAX_WIDTH, or one from the arguments
# Filters that make no text of their arguments, so that their sizes need no check
_SMALL_FILTERS = frozenset({
    "abs", "attr", "batch", "count", "d", "default", "dictsort", "first", "float", "groupby", "int", "items", "last",
    "length", "list", "map", "max", "min", "random", "reject", "rejectattr", "reverse", "round", "select", "selectattr",
    "slice", "sort", "unique",
})  # fmt: skip


class _BoundedGenerator(CodeGenerator):
    """Compiles ``~`` to `BoundedSandbox.concat`, and a call of `BoundedSandbox.check_time` into loops."""

    def blockvisit(self, body: Iterable[nodes.Node], frame: Frame) -> None:
        if frame.loop_frame:
            self.writeline("environment.check_time()")
        super().blockvisit(body, frame)

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:  # noqa: N802 - jinja2 calls it so
        self.write("environment.concat(map(environment.text, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write(")))")


class BoundedSandbox(ImmutableSandboxedEnvironment):
    """A sandbox whose templates can not take much memory or time, neither while they are compiled nor rendered.

    Operators, filters and methods of texts are refused before they make a text longer than `MAX_TEXT`. Operators are
    never computed at compile time. Loops, calls, filters and tests end a rendering after ``max_render_s``.
    """

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _BoundedGenerator

    def __init__(self, max_render_s: float = MAX_RENDER_S, **options: Any) -> None:
        super().__init__(finalize=self.text, **options)
        self._max_render_s = max_render_s
        self._made = threading.local()
        del self.globals["lipsum"]
        for name in self.tests:
            self.tests[name] = self._timed(self.tests[name])
        for name, function in self.filters.items():
            self.filters[name] = self._timed(function) if name in _SMALL_FILTERS else self.bounded(name, function)

    def begin(self) -> None:
        """Reset the count of characters and the time that this thread's rendering takes."""
        self._made.characters = self._made.steps = 0
        self._made.end_s = time.thread_time() + self._max_render_s

    def check_time(self) -> None:
        """SecurityError if the rendering has taken too long."""
        self._made.steps = steps = getattr(self._made, "steps", 0) + 1
        if steps % _STEPS_PER_LOOK == 0 and time.thread_time() > getattr(self._made, "end_s", math.inf):
            raise SecurityError(f"it computes for more than {self._max_render_s:g} s")

    def _timed(self, function: Any) -> Callable[..., Any]:
        @functools.wraps(function)  # keeps jinja2's mark that the first argument is the context or the environment
        def checked(*args: Any, **kwargs: Any) -> Any:
            self.check_time()
            return function(*args, **kwargs)

        return checked

    def count(self, characters: int) -> None:
        """SecurityError if a text of so many characters, or all of the rendering's, are too many."""
        self._made.characters = getattr(self._made, "characters", 0) + characters
        if characters > MAX_TEXT or self._made.characters > MAX_MADE:
            raise SecurityError("it makes texts that are too long")

    def text(self, value: Any) -> Any:
        """``value`` as a text."""
        if isinstance(value, str):
            return value
        if isinstance(value, list | tuple | dict):
            self.count(_size(value))
        return str(value)

    def concat(self, parts: Iterable[str]) -> str:
        """The joined ``parts``."""
        kept, size = [], 0
        for part in parts:
            size += len(part)
            if size > MAX_TEXT:
                self.count(size)
            kept.append(part)
        self.count(size)
        return "".join(kept)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
            if bits > MAX_BITS and operator != "%":
                raise SecurityError("it computes integers that are too large")
        elif operator == "+" and hasattr(left, "__len__") and hasattr(right, "__len__"):
            self.count(len(left) + len(right))
        elif operator == "*":
            number, sized = (left, right) if isinstance(left, int) else (right, left)
            if hasattr(sized, "__len__") and isinstance(number, int):
                self.count(len(sized) * max(number, 0))
        elif operator == "%" and isinstance(left, str):
            self._check("format", left, (right,), {})
        return super().call_binop(context, operator, left, right)

    def call(self, context: Context, function: Any, /, *args: Any, **kwargs: Any) -> Any:
        self.check_time()
        method = getattr(function, "__wrapped__", function)  # the sandbox wraps `str.format`
        owner = getattr(method, "__self__", None)
        if isinstance(owner, str):
            self._check(method.__name__, owner, args, kwargs)
        return super().call(context, function, *args, **kwargs)

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def checked(*args: Any, **kwargs: Any) -> Any:
            marked = hasattr(function, "jinja_pass_arg")
            self._check(name, args[marked], args[marked + 1 :], kwargs)
            return function(*args, **kwargs)

        return self._timed(checked)

    def _check(self, name: str, value: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """SecurityError if the filter or method ``name`` would make too long a text of ``value``."""
        given = [*args, *kwargs.values()]
        size = _size(value) + _size(given)
        numbers = [each for each in given if isinstance(each, int)]
        if max(numbers, default=0) > MAX_WIDTH:
            raise SecurityError(f"{name}: the number is too large")
        width = max([*numbers, *(len(each) for each in given if isinstance(each, str))], default=0)
        if isinstance(value, str):
            if name in ("format", "format_map") and _WIDE.search(value):
                raise SecurityError(f"{name}: the width is too large")
            if name in ("replace", "translate"):
                old = given[0] if given and isinstance(given[0], str) else ""
                size += value.count(old) * max(width, _size(given) if name == "translate" else 0)
            elif name in ("join", "wordwrap"):
                size += len(value) * width
            elif name in ("expandtabs", "indent"):
                size += (value.count("\n") + value.count("\t") + 1) * width
        elif name in ("join", "tojson", "pprint"):
            size += size * width
        self.count(size)


_SIZED = (str, list, tuple, Mapping)
_CONTAINER, _ITEM = 16, 8  # characters that a container and each of its items count for: about what they take in JSON


def _size(value: Any) -> int:
    """Characters of the texts in a value, at any depth, and a share for containers; stops above `MAX_TEXT`."""
    size, left = 0, [value]
    while left and size <= MAX_TEXT:
        each = left.pop()
        if isinstance(each, str):
            size += len(each)
        elif isinstance(each, Mapping):
            size += _CONTAINER + _ITEM * len(each)
            left += [part for pair in each.items() for part in pair if isinstance(part, _SIZED)]
        elif isinstance(each, list | tuple):
            size += _CONTAINER + _ITEM * len(each)
            left += [part for part in each if isinstance(part, _SIZED)]
    return size


class ChatTemplate:
    """A compiled chat template. max_render_s: processor time of one rendering.

    Raises:
        ModelError: the template is not valid Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, str], max_render_s: float = MAX_RENDER_S) -> None:
        environment = BoundedSandbox(
            max_render_s, trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, loopcontrols]
        )
        environment.filters["tojson"] = environment.bounded("tojson", _to_json)
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = lambda pattern: datetime.now().strftime(pattern)
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except (TemplateError, RecursionError) as error:
            raise ModelError(f"the model's chat template can not be compiled: {error}; send a plain prompt") from None
        self._environment = environment

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of ``messages``; InvalidRequestError when the template refuses them."""
        self._environment.begin()
        try:
            return self._template.render(
                messages=messages,
                add_generation_prompt=add_generation_prompt,
                tools=tools or None,
                documents=None,
                **self._variables,
            )
        except _REFUSALS as error:
            problem = f"the model's chat template refused them: {error}"
            raise InvalidRequestError([FieldViolation("messages", problem)]) from None


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None, **options: Any) -> str:
    # jinja2's own filter escapes <, > and & for HTML, which would change the prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
