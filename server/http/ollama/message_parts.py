"""The texts and tool calls of an answer, as Ollama's messages."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson

from server.http.openai.tool_call import ToolCall


def message(parts: Sequence[str | ToolCall], n_before: int = 0) -> dict[str, Any]:
    """One message of all ``parts``; its calls are numbered from ``n_before`` on."""
    text = "".join(part for part in parts if isinstance(part, str))
    found: dict[str, Any] = {"role": "assistant", "content": text}
    calls = [part for part in parts if isinstance(part, ToolCall)]
    if calls:
        found["tool_calls"] = [_call(call, n_before + i) for i, call in enumerate(calls)]
    return found


def _call(call: ToolCall, index: int) -> dict[str, Any]:
    """Here arguments are an object, which they may fail to be."""
    try:
        arguments = orjson.loads(call.arguments)
    except orjson.JSONDecodeError:
        arguments = call.arguments
    named = arguments if isinstance(arguments, dict) else {"value": arguments}
    return {"id": call.call_id, "function": {"index": index, "name": call.name, "arguments": named}}
