"""Anthropic's dialect: /v1/messages, with its body and both forms of its answer, and /v1/messages/count_tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from server.http.answer_parser import as_object
from server.http.answering import Answer, Sample, Totals, answering, named_event
from server.http.call import Call, Endpoint, ErrorStyle
from server.http.conversation import Block, Blocks, Conversation, Step, Steps, read_part, read_text
from server.http.errors import CallRefusedError, Refusal
from server.http.fields import COMMON, CONTINUES, MODEL, SAMPLING, STREAM, TEMPLATE_VARIABLES, encode_messages
from server.http.openai_format import extras
from server.http.tool_use import AnswerForm, FlatTools, ToolUse, answer_form, read_tools
from server.json_body import Body, write_json
from server.request_fields import (
    FLAG,
    FORMAT,
    NOT_KEPT,
    OBJECT,
    PREDICTION,
    TEXT,
    TEXTS,
    Field,
    Table,
    either,
    listed,
    object_field,
    param_field,
    param_fields,
    with_fields,
)
from server.served_model import Task
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent, SamplingParams, StoppingParams
from specdec.models.tokenizer import Tokenizer

_PART = with_fields(
    {
        "type": {"enum": ["text", "document", "tool_use", "tool_result"]},
        "text": TEXT,
        "source": {**OBJECT, "description": "Of a document: its plain text in `data`, or blocks of text in `content`."},
        "title": TEXT,
        "context": TEXT,
        "id": TEXT,
        "name": TEXT,
        "input": OBJECT,
        "tool_use_id": TEXT,
        "content": TEXTS,
    },
    "type",
)
_MESSAGE = with_fields(
    {"role": {"enum": ["user", "assistant", "system"]}, "content": either(TEXT, listed(_PART))}, "role", "content"
)
_TOOL = with_fields(
    {"name": TEXT, "description": TEXT, "input_schema": OBJECT, "strict": FLAG, "type": {"enum": ["custom"]}}, "name"
)
_CHOICE = with_fields(
    {
        "type": {"enum": ["auto", "any", "tool", "none"]},
        "name": TEXT,
        "disable_parallel_tool_use": {**FLAG, "description": "At most one call."},
    }
)
_THINKING = Field("type", {"enum": ["enabled", "disabled", "adaptive"]})
PROMPT_FIELDS: Table = (
    MODEL,
    Field("system", either(TEXT, listed(with_fields({"text": TEXT})))),
    Field("messages", {**listed(_MESSAGE, minItems=1), "description": CONTINUES}),
    Field("tools", listed(_TOOL)),
    Field("tool_choice", _CHOICE),
    object_field("thinking", (_THINKING, param_field(SamplingParams, "thinking_budget", "budget_tokens"))),
    TEMPLATE_VARIABLES,
)
MESSAGE_FIELDS: Table = (
    *PROMPT_FIELDS,
    param_field(StoppingParams, "max_tokens"),
    STREAM,
    Field("thread", NOT_KEPT),
    object_field("output_config", (FORMAT,)),
    replace(FORMAT, name="output_format"),  # its name in earlier versions of the API
    *SAMPLING,
    param_field(StoppingParams, "stop", "stop_sequences"),
    *param_fields(StoppingParams, "max_tokens", "stop"),
    PREDICTION,
    *COMMON,
)
_TEXT = ("text",)
_READABLE = (*_TEXT, "document")
# Claude Code's first line of a system prompt differs between conversations: no other one would find a cached prefix.
_BILLING = re.compile(r"\Ax-anthropic-billing-header:.*\n?")
_ROLES = ("user", "assistant", "system")
_TOOLS = FlatTools(("custom", None), "input_schema")
_CHOICES = {"auto": "auto", "any": "required", "none": "none"}


async def parse_messages(call: Call) -> MessageAnswer:
    """What ``call`` asks for; raises as `Call.checked_request`."""
    body, fields = await call.read_request(MESSAGE_FIELDS)
    if body.has("thread"):
        # Anthropic's clients know this reason, and then send the whole conversation.
        problem = "thread: nothing is kept on this server; send the whole conversation in messages"
        raise CallRefusedError(400, "THREAD_UNSUPPORTED_REQUEST", problem, "thread")
    tools = _read_tools(body, call.model.tokenizer.loaded)
    ids = await _read_prompt(call, body, tools)
    form = answer_form(body, fields, tools, call.model.tokenizer.loaded, ids)
    request = call.checked_request(f"msg_{call.request_id}", body, fields, ids)
    return MessageAnswer(call, request, form, stream=fields.own["stream"])


async def _read_prompt(call: Call, body: Body, tools: ToolUse | None) -> tuple[int, ...]:
    """Token ids of the conversation with the answer's beginning, which the last message may continue. Empty: there
    are none, or a field is wrong, which ``body`` notes.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    call.field_names["prompt"] = "messages"
    conversation = Conversation()
    if body.has("system") and (text := _BILLING.sub("", read_text(body, "system", _TEXT))):
        conversation.say("system", text)
    _read_turns(body, conversation)
    if body.violations.found:
        return ()
    beginning, thinking = conversation.take_beginning(), body.object("thinking")
    variables = {"enable_thinking": False} if thinking and thinking.raw("type") == "disabled" else None
    return await encode_messages(body, call.model, conversation.messages, tools, beginning, variables)


def _read_turns(body: Body, conversation: Conversation) -> None:
    given = body.objects("messages")
    if not given and body.raw("messages") in (None, []):
        body.refuse("messages", "must hold at least one message")
    for message in given:
        role = message.text("role")
        if role not in _ROLES:
            message.refuse("role", f"must be {', '.join(_ROLES)}")
        elif not isinstance(message.raw("content"), list):
            conversation.say(role, read_text(message, "content", _TEXT))
        else:
            for block in message.objects("content"):
                _read_block(block, role, conversation)


def _read_block(block: Body, role: str, conversation: Conversation) -> None:
    kind = block.text("type")
    if kind == "tool_use" and role == "assistant":
        name, call_id, arguments = block.needed_text("name"), block.needed_text("id"), block.object("input")
        if arguments is None and not block.has("input"):
            block.refuse("input", "is needed")
        if not block.violations.found:
            conversation.call(call_id, name, write_json(block.raw("input")).decode())
    elif kind == "tool_result" and role == "user":
        call_id = block.needed_text("tool_use_id")
        conversation.answer(call_id, read_text(block, "content", _READABLE) if block.has("content") else "")
    elif kind in (_READABLE if role == "user" else _TEXT):
        conversation.say(role, read_part(block, _READABLE))
    elif kind == "thinking" and role == "assistant":
        conversation.think(block.text("thinking") or "")
    elif not (kind == "redacted_thinking" and role == "assistant"):  # of other models
        kinds = {"assistant": "text or tool_use", "system": "text"}.get(role, "text, document or tool_result")
        block.refuse("type", f"must be {kinds} where the role is {role}; the model reads text only")


def _read_tools(body: Body, tokenizer: Tokenizer) -> ToolUse | None:
    """Translates ``tool_choice`` to that of OpenAI, and reads the tools."""
    same: dict[str, Any] = {"tools": body.raw("tools")}
    choice = body.object("tool_choice")
    if choice is not None:
        kind = choice.text("type") or ""
        if kind == "tool":
            same["tool_choice"] = {"type": "function", "name": choice.raw("name")}
        elif kind in _CHOICES:
            same["tool_choice"] = _CHOICES[kind]
        else:
            choice.refuse("type", "must be auto, any, tool or none")
        same["parallel_tool_calls"] = not choice.flag("disable_parallel_tool_use")
    return read_tools(Body(same, body.violations, body.names), tokenizer, _TOOLS)


_ERROR_TYPES = {
    401: "authentication_error", 403: "permission_error", 404: "not_found_error", 408: "timeout_error",
    413: "request_too_large", 429: "rate_limit_error", 500: "api_error", 503: "overloaded_error",
}  # fmt: skip
_TOO_LONG = "prompt is too long: {got} tokens > {limit} maximum; shorten it"


def _error_body(refusal: Refusal) -> dict[str, Any]:
    """Errors as Anthropic words them; ``param`` and ``code`` are those of OpenAI."""
    kind = _ERROR_TYPES.get(refusal.status, "invalid_request_error")
    code = refusal.reason.lower()
    error = {"type": kind, "message": refusal.worded(_TOO_LONG), "param": refusal.field, "code": code}
    return {"type": "error", "error": {**error, "details": {"error_code": code}}}


ANTHROPIC_ERRORS = ErrorStyle(_error_body, named_event)


def usage(totals: Totals) -> dict[str, int]:
    """``input_tokens`` excludes cached tokens."""
    return {
        "input_tokens": totals.prompt_tokens - totals.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": totals.cached_tokens,
        "output_tokens": totals.output_tokens,
    }


def stop_fields(event: Finished, called: bool, limit: int | None, tokenizer: Tokenizer) -> dict[str, Any]:
    """Why the answer ended, and the text that ended it. ``limit``: the call's own, in tokens."""
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
    """One block of an answer in one piece."""
    if block.is_thought:
        return {"type": "thinking", "thinking": block.text, "signature": ""}
    if block.call is None:
        return {"type": "text", "text": block.text}
    given = as_object(block.text or "{}")  # a stream opens a block before it has arguments
    return {"type": "tool_use", "id": block.call.call_id, "name": block.call.name, "input": given}


class MessageAnswer(Answer):
    """A stream has the message without content, its blocks in turn, and its end."""

    def __init__(self, call: Call, request: Request, form: AnswerForm, *, stream: bool) -> None:
        super().__init__(call, [request], stream=stream)
        self._limit = request.stopping.max_tokens
        self._head: dict[str, Any] = {
            "id": f"msg_{call.request_id}",
            "type": "message",
            "role": "assistant",
            "model": call.model.name,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            **call.notes(),
        }
        self.form, self._blocks = form, Blocks(form)
        self._end: dict[str, Any] = {}

    def take(self, event: RequestEvent) -> bytes:
        if isinstance(event, Delta):
            return self._steps(self._blocks.push(event.text, event.token_ids))
        if isinstance(event, Finished):
            rest = self._steps(self._blocks.end())
            self._end = stop_fields(event, self._blocks.parser.whole_calls > 0, self._limit, self._tokenizer)
            return rest
        started = {"type": "message_start", "message": {**self._head, "usage": usage(self.totals)}}
        return named_event(started) + named_event({"type": "ping"})

    def last(self) -> bytes:
        end = {"type": "message_delta", "delta": self._end, "usage": usage(self.totals), **extras(self.totals)}
        return named_event(end) + named_event({"type": "message_stop"})

    def whole(self, samples: Sequence[Sample]) -> dict[str, Any]:
        (sample,) = samples
        blocks = Blocks.of(self.form, sample.text, sample.token_ids)
        end = stop_fields(sample.end, blocks.parser.whole_calls > 0, self._limit, self._tokenizer)
        content = [content_block(block) for block in blocks.found]
        return {**self._head, "content": content, **end, "usage": usage(self.totals), **extras(self.totals)}

    def _steps(self, steps: Steps) -> bytes:
        return b"".join(named_event(_step_event(*step)) for step in steps)


def _step_event(step: Step, block: Block, text: str) -> dict[str, Any]:
    if step is Step.CLOSE:
        return {"type": "content_block_stop", "index": block.index}
    if step is Step.OPEN:
        return {"type": "content_block_start", "index": block.index, "content_block": content_block(block)}
    delta = {"type": "thinking_delta", "thinking": text} if block.is_thought else {"type": "text_delta", "text": text}
    if block.call is not None:
        delta = {"type": "input_json_delta", "partial_json": text}
    return {"type": "content_block_delta", "index": block.index, "delta": delta}


async def count_tokens(call: Call) -> None:
    """Answer with the length of a message's prompt."""
    body, _ = await call.read_request(PROMPT_FIELDS)
    ids = await _read_prompt(call, body, _read_tools(body, call.model.tokenizer.loaded))
    body.violations.raise_if_any()
    await call.reply(200, {"input_tokens": len(ids)})


ANTHROPIC = (
    Endpoint("POST", "/v1/messages", answering(parse_messages), ANTHROPIC_ERRORS, "Anthropic: answer in a conversation",
             MESSAGE_FIELDS, ("messages",), task=Task.CHAT, gated=True),
    Endpoint("POST", "/v1/messages/count_tokens", count_tokens, ANTHROPIC_ERRORS, "Anthropic: how long a prompt is",
             PROMPT_FIELDS, ("messages",), task=Task.CHAT),
)  # fmt: skip
