"""Anthropic's dialect: /v1/messages, its streamed answer, its whole answer, and /v1/messages/count_tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from server.http.answering import MEDIA_TYPE, Totals, named_event, stream_answer, whole_answer
from server.http.anthropic_request import MessagesRequest, count_prompt, parse_messages
from server.http.blocks import Block, Blocks, Step, Steps
from server.http.call import Call, Endpoint
from server.http.errors import Refusal
from server.http.fields import (
    COMMON,
    COUNT,
    FLAG,
    OBJECT,
    PREDICTION,
    SAMPLING,
    STOPPING,
    TEXT,
    TEXTS,
    Schema,
    json_operation,
)
from server.http.openai_format import extras
from server.interfaces import TokenizerLike
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, RequestEvent

_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip


class AnthropicErrors:
    """``param`` and ``code`` are as OpenAI's errors have them."""

    def body(self, refusal: Refusal) -> dict[str, Any]:
        """The body of an answer that refuses."""
        kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
        error = {"type": kind, "message": refusal.message, "param": refusal.field, "code": refusal.reason.lower()}
        return {"type": "error", "error": error}

    def event(self, refusal: Refusal) -> bytes:
        """An event with the same body."""
        return named_event(self.body(refusal))


def usage(totals: Totals) -> dict[str, int]:
    """``input_tokens`` leaves out those that were cached."""
    return {
        "input_tokens": totals.prompt_tokens - totals.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached_tokens,
        "output_tokens": totals.output_tokens,
    }


def stop_fields(event: Finished, called: bool, limit: int | None, tokenizer: TokenizerLike) -> dict[str, Any]:
    """Why the answer ended, and the text that ended it. ``limit``: how many tokens were asked for at most."""
    reason, matched = "end_turn", None
    match event.reason:
        case FinishReason.LENGTH:
            in_full = limit is None or event.usage.output_tokens < limit
            reason = "model_context_window_exceeded" if in_full else "max_tokens"
        case FinishReason.ABORTED:
            reason = "abort"
        case FinishReason.STOP_STRING | FinishReason.STOP_TOKEN:
            reason, matched = "stop_sequence", event.matched_stop
        case _ if called:
            reason = "tool_use"
    if isinstance(matched, int):
        matched = tokenizer.token_bytes(matched).decode("utf-8", "replace")
    return {"stop_reason": reason, "stop_sequence": matched}


def content_block(block: Block) -> dict[str, Any]:
    """One block of a whole answer. The arguments of a call are an object, which they may fail to be."""
    if block.call is None:
        return {"type": "text", "text": block.text}
    try:
        given = orjson.loads(block.text)
    except orjson.JSONDecodeError:
        given = block.text
    arguments = given if isinstance(given, dict) else {"value": given}
    return {"type": "tool_use", "id": block.call.call_id, "name": block.call.name, "input": arguments}


def message_head(call: Call) -> dict[str, Any]:
    """An answer that has only begun."""
    return {
        "id": f"msg_{call.request_id}",
        "type": "message",
        "role": "assistant",
        "model": call.model.name,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        **call.notes(),
    }


class MessageStream:
    """The message without content, its blocks one after the other, and how it ended."""

    media_type = MEDIA_TYPE

    def __init__(self, head: dict[str, Any], parsed: MessagesRequest, tokenizer: TokenizerLike) -> None:
        self._head, self._request, self._tokenizer = head, parsed.request, tokenizer
        self._blocks, self._totals = Blocks(parsed.tools), Totals()
        self._end: dict[str, Any] = {}

    def take(self, prompt: int, event: RequestEvent) -> bytes:
        """The events that ``event`` makes."""
        self._totals.add(event)
        if isinstance(event, Delta):
            return self._steps(self._blocks.push(event.text))
        if isinstance(event, Finished):
            rest = self._steps(self._blocks.end())
            self._end = stop_fields(event, self._blocks.called, self._request.stopping.max_tokens, self._tokenizer)
            return rest
        started = {"type": "message_start", "message": {**self._head, "usage": usage(self._totals)}}
        return named_event(started) + named_event({"type": "ping"})

    def last(self) -> bytes:
        """How it ended, and what it took."""
        end = {"type": "message_delta", "delta": self._end, "usage": usage(self._totals), **extras(self._totals)}
        return named_event(end) + named_event({"type": "message_stop"})

    def _steps(self, steps: Steps) -> bytes:
        return b"".join(named_event(_step_event(*step)) for step in steps)


def _step_event(step: Step, block: Block, text: str) -> dict[str, Any]:
    if step is Step.CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    if step is Step.OPEN:
        empty: dict[str, Any] = {"type": "text", "text": ""}
        if block.call is not None:
            empty = {"type": "tool_use", "id": block.call.call_id, "name": block.call.name, "input": {}}
        return {"type": "content_block_start", "index": block.index, "content_block": empty}
    delta = {"type": "text_delta", "text": text}
    if block.call is not None:
        delta = {"type": "input_json_delta", "partial_json": text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


async def create_message(call: Call) -> None:
    """Answer ``call``.

    Raises:
        RequestError: it can not be served.
    """
    model = call.model
    _tell_id(call)
    with model.gate.enter():
        parsed = await parse_messages(call)
        head, tokenizer = message_head(call), model.tokenizer.loaded
        if parsed.stream:
            await stream_answer(call, [parsed.request], MessageStream(head, parsed, tokenizer))
            return
        (sample,), totals = await whole_answer(call, [parsed.request])
        assert sample.end is not None  # an answer in one piece is made of finished samples
        blocks = Blocks.of(sample.text, parsed.tools)
        end = stop_fields(sample.end, blocks.called, parsed.request.stopping.max_tokens, tokenizer)
        content = [content_block(block) for block in blocks.found]
        await call.reply(200, {**head, "content": content, **end, "usage": usage(totals), **extras(totals)})


async def count_tokens(call: Call) -> None:
    """How long the prompt of a message would be.

    Raises:
        RequestError: it can not be read.
    """
    _tell_id(call)
    await call.reply(200, {"input_tokens": await count_prompt(call)})


def _tell_id(call: Call) -> None:
    """The call's id by the name that Anthropic's clients look for."""
    call.headers.append((b"request-id", call.request_id.encode("latin-1")))


_PARTS: Schema = {
    "oneOf": [TEXT, {"type": "array", "items": {"type": "object", "required": ["type"], "properties": {
        "type": {"enum": ["text", "tool_use", "tool_result"]}, "text": TEXT, "id": TEXT, "name": TEXT, "input": OBJECT,
        "tool_use_id": TEXT, "content": TEXTS,
    }}}],
}  # fmt: skip
_CHOICE: Schema = {
    "type": "object",
    "properties": {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": TEXT,
        "disable_parallel_tool_use": {**FLAG, "description": "At most one call."},
    },
}
PROMPT_FIELDS: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "system": {"oneOf": [TEXT, {"type": "array", "items": {"type": "object", "properties": {"text": TEXT}}}]},
    "messages": {
        "type": "array",
        "minItems": 1,
        "description": "The last one, where it is the assistant's, is what the answer goes on from.",
        "items": {
            "type": "object",
            "required": ["role", "content"],
            "properties": {"role": {"enum": ["user", "assistant", "system"]}, "content": _PARTS},
        },
    },
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "required": ["name"],
            "properties": {
                "name": TEXT,
                "description": TEXT,
                "input_schema": OBJECT,
                "strict": FLAG,
                "type": {"enum": ["custom"]},
            },
        },
    },
    "tool_choice": _CHOICE,
}
MESSAGE_FIELDS: Mapping[str, Schema] = {
    **PROMPT_FIELDS,
    "max_tokens": {
        **COUNT,
        "description": "None: up to the context. 0: only compute the prompt into the prefix cache.",
    },
    "stream": FLAG,
    "output_config": {
        "type": "object",
        "properties": {
            "format": {
                "type": "object",
                "properties": {"type": {"enum": ["text", "json_object", "json_schema"]}, "schema": OBJECT},
            }
        },
    },
    **SAMPLING,
    **{("stop_sequences" if name == "stop" else name): schema for name, schema in STOPPING.items()},
    **PREDICTION,
    **COMMON,
}

_ERRORS = AnthropicErrors()
ANTHROPIC = (
    Endpoint("POST", "/v1/messages", create_message, _ERRORS,
             json_operation("Anthropic: answer in a conversation", MESSAGE_FIELDS, ("messages",)), task=Task.CHAT),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, _ERRORS,
             json_operation("Anthropic: how long a prompt is", PROMPT_FIELDS, ("messages",)), task=Task.CHAT),
)  # fmt: skip
