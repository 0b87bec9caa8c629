"""A tool call that a model wrote into its text."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, field
from typing import Any

import orjson


@dataclass(frozen=True, slots=True)
class ToolCall:
    """``arguments`` is JSON text."""

    name: str
    arguments: str
    call_id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    @staticmethod
    def parse(text: str) -> ToolCall | None:
        """What stands between ``<tool_call>`` and ``</tool_call>``; None when it is no call."""
        try:
            call = orjson.loads(text)
        except orjson.JSONDecodeError:
            return None
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            return None
        arguments = call.get("arguments", {})
        if not isinstance(arguments, str):
            try:
                arguments = orjson.dumps(arguments).decode()
            except TypeError:  # nested deeper than it writes
                return None
        return ToolCall(call["name"], arguments)

    def fields(self) -> dict[str, Any]:
        """As OpenAI's API has it."""
        return {"id": self.call_id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}
