"""Chat messages as chat templates expect them, from what clients send."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from specdec.errors import ViolationCollector


def plain_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with every content one text, and the arguments of tool calls as objects rather than JSON text.

    Templates of text models concatenate contents, and write arguments out as JSON themselves.

    Raises:
        InvalidRequestError: a content is neither text nor a list of text parts; each such place is named.
    """
    seen = ViolationCollector()
    plain: list[dict[str, Any]] = []
    for i, message in enumerate(messages):
        copy = {**message, "content": _text(message.get("content"), f"messages[{i}].content", seen)}
        if isinstance(calls := message.get("tool_calls"), list):
            copy["tool_calls"] = [_call(call) for call in calls]
        plain.append(copy)
    seen.raise_if_any()
    return plain


def _text(content: Any, path: str, seen: ViolationCollector) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        seen.check(False, path, "must be text or a list of text parts")
        return ""
    texts = [part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else None for part in content]
    for i, text in enumerate(texts):
        rule = 'must be a text part, {"type": "text", "text": "..."}; the model reads nothing else'
        seen.check(isinstance(text, str), f"{path}[{i}]", rule)
    return "\n".join(text for text in texts if isinstance(text, str))


def _call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call
