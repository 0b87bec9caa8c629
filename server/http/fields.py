"""Body fields that several dialects share: readers that need the call or the tokenizer, and JSON schemas."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from server.http.call import Call
from server.http.tool_use import ToolUse
from server.json_body import Body
from server.request_fields import param_schemas, read_speculation, read_values
from server.served_model import ServedModel
from specdec.core.fields import MAX_LOGPROBS, MAX_NAME
from specdec.core.types import Request, SamplingParams, SpeculationParams, StoppingParams
from specdec.errors import InvalidRequestError


def read_common(call: Call, body: Body) -> dict[str, Any]:
    """Fields of `Request`: speculation, session (or the header ``x-session-id``), cache salt, priority (a higher one
    goes first), milliseconds per token to keep to. ``call`` learns which other call this one takes the place of."""
    call.supersedes_key = body.text("supersedes_key") or ""
    return {
        "speculation": read_speculation(body),
        "session": call.header("x-session-id"),
        **read_values(body, Request),
    }


async def build_request(call: Call, body: Body, prefix: str, ids: tuple[int, ...], **options: Any) -> Request:
    """The request for one prompt with ``options`` and what every dialect has beside them; its id is the call's, behind
    ``prefix``. Without ``ids``, which were bad or are not there, it has a stand-in for them: the other fields are
    checked all the same."""
    options["prediction_ids"] = await read_prediction(body, call.model)
    options |= read_common(call, body)
    return Request(request_id=f"{prefix}{call.request_id}", prompt_ids=ids or (0,), **options)


async def read_prediction(body: Body, model: ServedModel) -> tuple[int, ...]:
    """Token ids of OpenAI's ``prediction``: ``{"type": "content", "content": text or text parts}``."""
    given = body.object("prediction")
    if given is None:
        return ()
    if given.text("type") not in (None, "content"):
        given.refuse("type", 'must be "content"')
    return tuple(await model.tokenizer.encode(_content(given), add_special=False))


def _content(given: Body) -> str:
    value = given.raw("content")
    if isinstance(value, str):
        return value
    texts = [part.text("text") for part in given.objects("content")] if isinstance(value, list) else [None]
    if None in texts:
        given.refuse("content", 'must be a string or a list of {"type": "text", "text": "..."}')
    return "".join(text for text in texts if text is not None)


async def read_conversation(
    body: Body, model: ServedModel, tools: ToolUse | None, *, add_generation_prompt: bool = True
) -> tuple[int, ...]:
    """Token ids of ``messages``, up to the answer's beginning unless not ``add_generation_prompt``; empty when they are
    bad, which is noted.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    given = body.objects("messages")
    messages = body.value("messages") if given else body.raw("messages")
    if not given:
        if messages is None or messages == []:
            body.refuse("messages", "must hold at least one message")
        return ()
    n_known = len(body.violations.found)
    for message in given:
        if not message.text("role"):
            message.refuse("role", "must be a string that is not empty")
    if len(body.violations.found) > n_known or not isinstance(messages, list):
        return ()
    return await encode_messages(body, model, messages, tools, add_generation_prompt=add_generation_prompt)


async def encode_messages(
    body: Body,
    model: ServedModel,
    messages: list[dict[str, Any]],
    tools: ToolUse | None,
    *,
    add_generation_prompt: bool = True,
) -> tuple[int, ...]:
    """Token ids of ``messages``, up to the answer's beginning unless not ``add_generation_prompt``; empty where the
    template refuses them, which is noted.

    Raises:
        ChatNotSupportedError: the model has no chat template.
    """
    try:
        known = None if tools is None else tools.tools
        return tuple(await model.tokenizer.encode_chat(messages, known, add_generation_prompt=add_generation_prompt))
    except InvalidRequestError as error:
        body.violations.found += error.violations
        return ()


Schema = Mapping[str, Any]

TEXT: Schema = {"type": "string"}
FLAG: Schema = {"type": "boolean"}
NUMBER: Schema = {"type": "number"}
COUNT: Schema = {"type": "integer", "minimum": 0}
TOP_LOGPROBS: Schema = {**COUNT, "maximum": MAX_LOGPROBS}
OBJECT: Schema = {"type": "object"}
TEXTS: Schema = {"oneOf": [TEXT, {"type": "array", "items": TEXT}]}
IDS: Schema = {"type": "array", "items": COUNT}

_N, _MAX_TOKENS = "n", "max_tokens"  # each dialect tells these by itself
SAMPLING = {name: schema for name, schema in param_schemas(SamplingParams).items() if name != _N}
STOPPING = {name: schema for name, schema in param_schemas(StoppingParams).items() if name != _MAX_TOKENS}
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
        "properties": param_schemas(SpeculationParams),
    },
    **param_schemas(Request),
    "supersedes_key": {
        **TEXT,
        "maxLength": MAX_NAME,
        "description": "Ends the running request with the same key of the same tenant, which gets 409, SUPERSEDED.",
    },
}
TOOLS: Mapping[str, Schema] = {
    "tools": {
        "type": "array",
        "items": {
            "type": "object",
            "properties": {
                "type": {"enum": ["function"]},
                "function": {
                    "type": "object",
                    "required": ["name"],
                    "properties": {
                        "name": {**TEXT, "minLength": 1},
                        "description": TEXT,
                        "parameters": {**OBJECT, "description": "A JSON schema."},
                        "strict": FLAG,
                    },
                },
            },
        },
    },
    "tool_choice": {
        "oneOf": [
            {"enum": ["auto", "none", "required", "any"]},
            {
                "type": "object",
                "description": "The one to call.",
                "properties": {
                    "type": {"enum": ["function"]},
                    "function": {"type": "object", "properties": {"name": TEXT}},
                },
            },
        ],
    },
    "parallel_tool_calls": {**FLAG, "default": True, "description": "False: at most one call."},
}
CONVERSATION: Mapping[str, Schema] = {
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {**TEXT, "minLength": 1}, "content": {"oneOf": [TEXT, {"type": "array"}]}},
        },
    },
    **TOOLS,
}
STREAM_OPTIONS: Schema = {"type": "object", "properties": {"include_usage": FLAG, "continuous_usage_stats": FLAG}}


def json_operation(summary: str, fields: Mapping[str, Schema], required: tuple[str, ...] = ()) -> dict[str, Any]:
    """The OpenAPI operation of an endpoint that takes a JSON object of ``fields``; unknown ones are ignored."""
    schema = {"type": "object", "properties": dict(fields), "required": list(required)}
    body = {"required": True, "content": {"application/json": {"schema": schema}}}
    return {"summary": summary, "requestBody": body, "responses": RESPONSES}


RESPONSES: Mapping[str, Any] = {
    "200": {"description": "The answer; server-sent events where a stream was asked for."},
    "4XX": {"description": "Refused; the body says why. 422: the model can not fill in. 429: come back later."},
    "5XX": {"description": "503: loading or draining; come back later."},
}
