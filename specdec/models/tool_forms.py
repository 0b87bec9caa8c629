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


_SIGNS = {
    "[ARGS]": ToolForm.MISTRAL_ARGS,
    "[TOOL_CALLS]": ToolForm.MISTRAL,
    ">>>": ToolForm.FUNCTIONARY,
    "<function=": ToolForm.FUNCTION_TAG,
    "<tool_call>": ToolForm.HERMES,
    "<|python_tag|>": ToolForm.LLAMA,
    '"parameters": ': ToolForm.LLAMA,
}


def tool_form(template: str) -> ToolForm | None:
    """The form in which a chat template, Jinja source, writes calls; None: in none of these."""
    if "tools" not in template:
        return None
    return next((form for sign, form in _SIGNS.items() if sign in template), None)
