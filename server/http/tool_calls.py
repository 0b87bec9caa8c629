"""Finds tool calls in a text while the model still writes it."""

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


def parse_tool_calls(text: str) -> list[str | ToolCall]:
    """A whole text as text and calls, in order."""
    parser = ToolCallParser()
    return [*parser.push(text), *parser.flush()]


_OPEN, _CLOSE = "<tool_call>", "</tool_call>"


class ToolCallParser:
    """Text comes in as pieces, and out as text and calls, in order.

    A call is what Hermes and Qwen write: ``<tool_call>{"name": ..., "arguments": {...}}</tool_call>``. What is not
    quite that stays text, tags and all. White space around calls is dropped. ``calls`` counts them.
    """

    def __init__(self) -> None:
        self._held = ""
        self._gap = ""  # white space before an open tag, dropped where a call follows
        self._inside = False
        self.calls = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Take the next piece; what is certain now comes out."""
        self._held += text
        found: list[str | ToolCall] = []
        while self._close(found) if self._inside else self._open(found):
            pass
        return found

    def flush(self) -> list[str | ToolCall]:
        """The text has ended: what was held back is certain now. A call that was not closed counts if it is whole."""
        found: list[str | ToolCall] = []
        if self._inside:
            self._take(self._held, "", found)
        elif self._held and not (self.calls and self._held.isspace()):
            found.append(self._held)
        self._held, self._inside = "", False
        return found

    def _open(self, found: list[str | ToolCall]) -> bool:
        """Let go of the text up to an open tag, or of what can not begin one; whether there is a tag."""
        before, tag, after = self._held.partition(_OPEN)
        if tag:
            text = before.rstrip()
            self._held, self._gap, self._inside = after, before[len(text) :], True
        else:
            size = next((n for n in range(len(_OPEN) - 1, 0, -1) if before.endswith(_OPEN[:n])), 0)
            text = before[: len(before) - size].rstrip()
            self._held = before[len(text) :]
        if text:
            found.append(text)
        return bool(tag)

    def _close(self, found: list[str | ToolCall]) -> bool:
        """Take the call up to its close tag, or find that it is none; whether the text goes on outside."""
        text, tag, after = self._held.partition(_CLOSE)
        if self._held.lstrip()[:1] not in ("", "{"):  # no call, whatever follows: nobody should wait for its end
            found.append(self._gap + _OPEN)
        elif tag:
            self._take(text, tag, found)
            self._held = after
        else:
            return False
        self._inside = False
        return True

    def _take(self, text: str, tag: str, found: list[str | ToolCall]) -> None:
        call = ToolCall.parse(text)
        found.append(f"{self._gap}{_OPEN}{text}{tag}" if call is None else call)
        self.calls += call is not None
