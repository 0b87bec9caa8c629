"""Renders a model's own chat template, in a sandbox: templates come from downloaded files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specdec.errors import FieldViolation, InvalidRequestError, ModelError

# What a template's expressions may raise on messages of a shape it did not expect
_REFUSALS = (TemplateError, ArithmeticError, AttributeError, LookupError, TypeError, ValueError, RecursionError)


class GenerationBlock(Extension):
    """``{% generation %}...{% endgeneration %}`` marks the assistant's text for training; here it is only its body."""

    tags = {"generation"}  # noqa: RUF012 - jinja2 declares it so

    def parse(self, parser: Parser) -> nodes.Node:
        """Read the block; its body stands for it."""
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
        except TemplateError as error:
            raise ModelError(f"the model's chat template can not be compiled: {error}; send a plain prompt") from None

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool,
        tools: Sequence[Mapping[str, Any]] | None = None,
    ) -> str:
        """The prompt text of ``messages``; InvalidRequestError when the template refuses them."""
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
    # not jinja2's own filter: that one escapes <, > and & for HTML, which would change the prompt
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, **options)


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)
