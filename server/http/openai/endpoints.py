"""Everything OpenAI's dialect serves, and how its bodies look."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.endpoint import Endpoint
from server.http.fields.schema import (
    COMMON,
    COUNT,
    FLAG,
    GRAMMAR,
    IDS,
    OBJECT,
    PREDICTION,
    RESPONSES,
    SAMPLING,
    STOPPING,
    STREAM_OPTIONS,
    TEXT,
    TEXTS,
    Schema,
    json_operation,
)
from server.http.openai.chat import chat
from server.http.openai.completions import complete
from server.http.openai.errors import OpenAIErrors
from server.http.openai.models import list_models, show_model
from specdec.engine.validation import MAX_LOGPROBS, MAX_N

_SHARED: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "n": {"type": "integer", "minimum": 1, "maximum": MAX_N, "default": 1},
    "best_of": {"type": "integer", "description": "Equal to n, where given."},
    "max_tokens": {**COUNT, "description": "0: only compute the prompt into the prefix cache."},
    "stream": FLAG,
    "stream_options": STREAM_OPTIONS,
    "return_token_ids": FLAG,
    "return_step_trees": {**FLAG, "description": "Streamed chunks with the token tree their step verified."},
    "skip_special_tokens": {**FLAG, "default": True},
    **SAMPLING,
    **STOPPING,
    **GRAMMAR,
    **PREDICTION,
    **COMMON,
}
_TOP = {"type": "integer", "minimum": 0, "maximum": MAX_LOGPROBS}
COMPLETION_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "prompt": {"oneOf": [TEXTS, IDS, {"type": "array", "items": IDS}]},
    "suffix": {**TEXT, "description": "What follows the gap that is to be filled."},
    "logprobs": _TOP,
    "echo": FLAG,
    "add_special_tokens": {**FLAG, "default": True},
    "parse_special": {**FLAG, "default": True, "description": "Read special tokens spelled out in the prompt as such."},
}
CHAT_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "messages": {
        "type": "array",
        "minItems": 1,
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {**TEXT, "minLength": 1}, "content": {"oneOf": [TEXT, {"type": "array"}]}},
        },
    },
    "tools": {"type": "array", "items": {"type": "object", "properties": {"function": OBJECT}}},
    "tool_choice": {"enum": ["auto", "none"]},
    "max_completion_tokens": COUNT,
    "logprobs": FLAG,
    "top_logprobs": _TOP,
}

_ERRORS = OpenAIErrors()
_MODEL = {"name": "model", "in": "path", "required": True, "schema": TEXT}
OPENAI = (
    Endpoint(
        "POST", "/v1/completions", complete, _ERRORS, json_operation("Continue a text", COMPLETION_FIELDS, ("prompt",))
    ),
    Endpoint(
        "POST",
        "/v1/chat/completions",
        chat,
        _ERRORS,
        json_operation("Answer in a conversation", CHAT_FIELDS, ("messages",)),
    ),
    Endpoint("GET", "/v1/models", list_models, _ERRORS, {"summary": "The model served", "responses": RESPONSES}),
    Endpoint(
        "GET",
        "/v1/models/{model:path}",
        show_model,
        _ERRORS,
        {"summary": "The model of a name", "parameters": [_MODEL], "responses": RESPONSES},
    ),
)
