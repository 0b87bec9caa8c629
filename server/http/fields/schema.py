"""JSON schemas of the fields that several dialects share, and the pieces operations are described with."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

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
