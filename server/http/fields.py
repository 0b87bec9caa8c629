"""Body fields that several dialects share: readers that need the call or the tokenizer, and JSON schemas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from server.frontend import Frontend
from server.http.call import Call
from server.json_body import Body
from server.request_fields import read_speculation
from specdec.engine.validation import validate_request
from specdec.errors import InvalidRequestError, PromptTooLongError, ViolationCollector
from specdec.types import EngineInfo, Request

_INT32 = (1 << 31) - 1


def read_common(call: Call, body: Body) -> dict[str, Any]:
    """Fields of `Request`: speculation, session (or the header ``x-session-id``), cache salt, priority (a higher one
    goes first), milliseconds per token to keep to. ``call`` learns which other call this one takes the place of."""
    call.supersedes_key = body.text("supersedes_key") or ""
    session = body.text("session")
    return {
        "speculation": read_speculation(body),
        "session": call.header("x-session-id") if session is None else session,
        "cache_salt": body.text("cache_salt") or "",
        "priority": body.integer("priority", -_INT32, _INT32) or 0,
        "target_tpot_ms": body.number("target_tpot_ms"),
    }


async def read_prediction(body: Body, frontend: Frontend) -> tuple[int, ...]:
    """Token ids of OpenAI's ``prediction``: ``{"type": "content", "content": text or text parts}``."""
    given = body.object("prediction")
    if given is None:
        return ()
    if given.text("type") not in (None, "content"):
        given.refuse("type", 'must be "content"')
    return tuple(await frontend.encode(_content(given), add_special=False))


def _content(given: Body) -> str:
    value = given.raw("content")
    if isinstance(value, str):
        return value
    texts = [part.text("text") for part in given.objects("content")] if isinstance(value, list) else [None]
    if None in texts:
        given.refuse("content", 'must be a string or a list of {"type": "text", "text": "..."}')
    return "".join(text for text in texts if text is not None)


async def read_conversation(body: Body, frontend: Frontend, tools: list[dict[str, Any]] | None) -> tuple[int, ...]:
    """Token ids of ``messages`` up to the answer's beginning; empty when they are bad, which is noted.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    messages, given = body.value("messages"), body.objects("messages")
    if not given:
        if isinstance(messages, list) or messages is None:
            body.refuse("messages", "must hold at least one message")
        return ()
    n_known = len(body.seen.violations)
    for message in given:
        if not message.text("role"):
            message.refuse("role", "must be a string that is not empty")
    if len(body.seen.violations) > n_known or not isinstance(messages, list):
        return ()
    try:
        return tuple(await frontend.encode_chat(messages, tools))
    except InvalidRequestError as error:
        body.seen.violations += error.violations
        return ()


def read_tools(body: Body) -> list[dict[str, Any]] | None:
    """``tools`` as the chat template takes them; None: the model is told of none. Of ``tool_choice``, "auto" and "none"
    are served."""
    n_known = len(body.seen.violations)
    tools: list[dict[str, Any]] = body.value("tools")
    given = body.objects("tools")
    for tool in given:
        function = tool.object("function")
        if function is None or not function.text("name"):
            tool.refuse("function", "must be an object with a name")
    choice = body.raw("tool_choice")
    if choice not in (None, "auto", "none"):
        rule = 'only "auto" and "none" are served; to force a form on the answer use response_format with a JSON schema'
        body.refuse("tool_choice", rule)
    usable = bool(given) and choice != "none" and len(body.seen.violations) == n_known
    return tools if usable else None


def validate(requests: Sequence[Request], info: EngineInfo, seen: ViolationCollector) -> None:
    """Refuse ``requests``, which differ in their prompts only, for what ``seen`` holds and the engine would refuse.

    Raises:
        InvalidRequestError: with every bad field, under the engine's names where the engine found it.
        PromptTooLongError: nothing else is wrong, but a prompt does not fit the context.
    """
    longest = max(len(request.prompt_ids) for request in requests)
    for request in requests:
        fits = len(request.prompt_ids) < info.max_context
        # A prompt that is refused for its length is not looked through: it may be of any length.
        checked = request if fits else dataclasses.replace(request, prompt_ids=(0,))
        try:
            validate_request(checked, info.vocab_size, info.max_context, info.drafters)
        except InvalidRequestError as error:
            known = {violation.field for violation in seen.violations}
            seen.violations += [violation for violation in error.violations if violation.field not in known]
    seen.raise_if_any()
    if longest >= info.max_context:
        raise PromptTooLongError(info.max_context - 1, longest)


Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
IDS: Schema = {"type": "array", "items": COUNT}

SAMPLING: Mapping[str, Schema] = {
    "temperature": {"type": "number", "minimum": 0, "default": 1, "description": "0 is greedy."},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 1},
    "top_k": {"type": "integer", "minimum": -1, "default": 0, "description": "0 and -1: off."},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0},
    "repetition_penalty": {"type": "number", "exclusiveMinimum": 0, "default": 1},
    "presence_penalty": {"type": "number", "default": 0},
    "frequency_penalty": {"type": "number", "default": 0},
    "logit_bias": {"type": "object", "additionalProperties": NUMBER, "description": "By token id."},
    "allowed_token_ids": IDS,
    "seed": {"type": "integer", "description": "The same seed gives the same tokens. -1 or none: a fresh one."},
}
STOPPING: Mapping[str, Schema] = {
    "stop": {**TEXTS, "description": "At most 64 different strings; names of special tokens stop at those."},
    "stop_token_ids": IDS,
    "min_tokens": COUNT,
    "include_stop_str_in_output": FLAG,
    "ignore_eos": FLAG,
}
GRAMMAR: Mapping[str, Schema] = {
    "response_format": {
        "type": "object",
        "properties": {
            "type": {"enum": ["text", "json_object", "json_schema"]},
            "json_schema": {"type": "object", "properties": {"schema": OBJECT}},
        },
    },
    "guided_json": {"oneOf": [TEXT, OBJECT]},
    "guided_regex": TEXT,
    "guided_choice": {"type": "array", "items": TEXT},
    "guided_grammar": {**TEXT, "description": "Lark with `start:`, or GBNF with `root ::=`."},
    "structured_outputs": {
        "type": "object",
        "properties": {
            "json": {"oneOf": [TEXT, OBJECT]},
            "regex": TEXT,
            "choice": {"type": "array", "items": TEXT},
            "grammar": TEXT,
            "json_object": FLAG,
        },
    },
}
PREDICTION: Mapping[str, Schema] = {
    "prediction": {
        "type": "object",
        "description": "What the output is expected to resemble; it changes how fast tokens come, never which.",
        "properties": {
            "type": {"enum": ["content"]},
            "content": {"oneOf": [TEXT, {"type": "array", "items": {"type": "object", "properties": {"text": TEXT}}}]},
        },
    }
}
COMMON: Mapping[str, Schema] = {
    "speculation": {
        "type": "object",
        "description": "Changes how fast tokens come, never which.",
        "properties": {
            "mode": {"enum": ["auto", "off", "on"]},
            "drafters": {"type": "array", "items": TEXT},
            "max_nodes": {"type": "integer", "minimum": 0, "maximum": 63},
            "max_depth": {"type": "integer", "minimum": 0, "maximum": 63},
            "width": {"type": "integer", "minimum": 1, "maximum": 16},
        },
    },
    "session": {**TEXT, "description": "An editor or a conversation; also the header x-session-id."},
    "cache_salt": {**TEXT, "description": "Requests share cached prefixes and draft texts only with an equal salt."},
    "priority": {"type": "integer", "default": 0, "description": "A higher one is scheduled first."},
    "target_tpot_ms": {"type": "number", "exclusiveMinimum": 0, "description": "Milliseconds per token to keep to."},
    "supersedes_key": {
        **TEXT,
        "description": "Ends the running request with the same key of the same tenant, which gets 409, SUPERSEDED.",
    },
}
STREAM_OPTIONS: Schema = {"type": "object", "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG}}


def json_operation(summary: str, fields: Mapping[str, Schema], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The OpenAPI operation of an endpoint that takes a JSON object of ``fields``; unknown ones are ignored."""
    schema = {"type": "object", "properties": dict(fields), "required": list(required)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": RESPONSES}


RESPONSES: Mapping[str, Any] = {
    "200": {"description": "The answer; server-sent events where a stream was asked for."},
    "4XX": {"description": "Refused; the body names what is wrong. 429 tells when to come back."},
    "5XX": {"description": "501: the model can not do this. 503: loading, restarting or draining; come back later."},
}
