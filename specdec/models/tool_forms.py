"""How models write tool calls into their text, by their chat templates."""

from __future__ import annotations

from enum import StrEnum


class ToolForm(StrEnum):
    """The form of one call; ``ARGS`` stands for a JSON object."""

    HERMES = "hermes"
    """``<tool_call>{"name": "f", "arguments": ARGS}</tool_call>``; Qwen's too."""
    LLAMA = "llama"
    """``{"name": "f", "parameters": ARGS}`` at the answer's beginning or behind ``<|python_tag|>``."""
    MISTRAL = "mistral"
    """``[TOOL_CALLS][{"name": "f", "arguments": ARGS}]``, one list of all calls."""
    MISTRAL_ARGS = "mistral-args"
    """``[TOOL_CALLS]f[ARGS]ARGS``."""
    FUNCTIONARY = "functionary"
    """A line that names the function, then ``ARGS``; ``>>>`` stands before every such line, but for the first, where
    the prompt ends in it. A line ``all`` begins text."""
    FUNCTION_TAG = "function-tag"
    """``<function=f>ARGS</function>``."""


# The first whose signs are all there. None: a form that is like another, and is not known.
_SIGNS: tuple[tuple[tuple[str, ...], ToolForm | None], ...] = (
    (("[TOOL_CALLS]", "[ARGS]"), ToolForm.MISTRAL_ARGS),
    (("[TOOL_CALLS]",), ToolForm.MISTRAL),
    ((">>>",), ToolForm.FUNCTIONARY),
    (("<function=", "<parameter="), None),  # a tag for each argument
    (("<function=",), ToolForm.FUNCTION_TAG),
    (("<tool_call>",), ToolForm.HERMES),
    (("<|python_tag|>",), ToolForm.LLAMA),
    (("ipython", '"parameters": '), ToolForm.LLAMA),
)


def tool_form(template: str) -> ToolForm | None:
    """The form in which a chat template, Jinja source, writes calls; None: in none of these."""
    if "tools" not in template:
        return None
    return next((form for signs, form in _SIGNS if all(sign in template for sign in signs)), None)
