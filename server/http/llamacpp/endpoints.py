"""Everything llama.cpp's dialect serves, and how its bodies look."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.endpoint import Endpoint
from server.http.fields.schema import (
    COMMON,
    COUNT,
    FLAG,
    IDS,
    NUMBER,
    OBJECT,
    RESPONSES,
    STOPPING,
    TEXT,
    Schema,
    json_operation,
)
from server.http.llamacpp.completions import complete, infill
from server.http.llamacpp.errors import LlamaErrors
from server.http.llamacpp.props import health, props
from server.http.llamacpp.tokens import detokenize, tokenize
from specdec.engine.validation import MAX_LOGPROBS, MAX_N

_TEXTS: Schema = {"type": "array", "items": TEXT}
_SHARED: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "n_predict": {"type": "integer", "description": "Negative: no limit. 0: only compute the prompt."},
    "n_cmpl": {"type": "integer", "minimum": 1, "maximum": MAX_N, "description": "Above 1 the answer is a list."},
    "n_indent": {**COUNT, "description": "End before a line that is indented less."},
    "t_max_predict_ms": {**NUMBER, "description": "From the first token on; the line is ended."},
    "stream": FLAG,
    "return_tokens": FLAG,
    "response_fields": {**_TEXTS, "description": "Paths such as timings/prompt_n; the answer has these keys only."},
    "samplers": {**_TEXTS, "description": "What is on; infill without a temperature is greedy."},
    "temperature": {"type": "number", "default": 0.8},
    "top_k": {"type": "integer", "minimum": -1, "default": 40},
    "top_p": {"type": "number", "exclusiveMinimum": 0, "maximum": 1, "default": 0.95},
    "min_p": {"type": "number", "minimum": 0, "maximum": 1, "default": 0.05},
    "repeat_penalty": {"type": "number", "exclusiveMinimum": 0, "default": 1},
    "presence_penalty": {"type": "number", "default": 0},
    "frequency_penalty": {"type": "number", "default": 0},
    "seed": {"type": "integer", "description": "-1 or none: a fresh one."},
    "logit_bias": {
        "oneOf": [{"type": "array", "items": {"type": "array", "minItems": 2, "maxItems": 2}}, OBJECT],
        "description": "Pairs, or an object, of a token id or a text and a number that is added; false: never.",
    },
    "n_probs": {**COUNT, "maximum": MAX_LOGPROBS, "description": "So many of the likeliest tokens beside each token."},
    "post_sampling_probs": {**FLAG, "description": "Refused beside n_probs: the model's own probabilities are told."},
    "grammar": {**TEXT, "description": "GBNF."},
    "json_schema": OBJECT,
    **STOPPING,
    **COMMON,
}
_EXTRA: Schema = {
    "type": "object",
    "required": ["text"],
    "properties": {"text": TEXT, "filename": TEXT, "time": NUMBER},
}
INFILL_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "input_prefix": TEXT,
    "input_suffix": TEXT,
    "prompt": {**TEXT, "description": "The cursor's line in front of it."},
    "input_extra": {"type": "array", "items": _EXTRA, "description": "Other texts of the project."},
}
COMPLETION_FIELDS: Mapping[str, Schema] = {**_SHARED, "prompt": {"oneOf": [TEXT, IDS]}}
TOKENIZE_FIELDS: Mapping[str, Schema] = {
    "content": TEXT, "add_special": FLAG, "parse_special": {**FLAG, "default": True}, "with_pieces": FLAG,
}  # fmt: skip

_ERRORS = LlamaErrors()
_MODEL = {"name": "model", "in": "query", "schema": TEXT}
_COMPLETION = json_operation("llama.cpp: continue a text", COMPLETION_FIELDS, ("prompt",))
_INFILL = json_operation("llama.cpp: fill a gap", INFILL_FIELDS, ("input_prefix", "input_suffix"))
LLAMACPP = (
    Endpoint("POST", "/infill", infill, _ERRORS, _INFILL),
    Endpoint("POST", "/completion", complete, _ERRORS, _COMPLETION),
    Endpoint("POST", "/completions", complete, _ERRORS, _COMPLETION),
    Endpoint(
        "POST",
        "/tokenize",
        tokenize,
        _ERRORS,
        json_operation("llama.cpp: ids of a text", TOKENIZE_FIELDS, ("content",)),
    ),
    Endpoint(
        "POST",
        "/detokenize",
        detokenize,
        _ERRORS,
        json_operation("llama.cpp: text of ids", {"tokens": IDS}, ("tokens",)),
    ),
    Endpoint(
        "GET",
        "/props",
        props,
        _ERRORS,
        {"summary": "llama.cpp: the model and the server", "parameters": [_MODEL], "responses": RESPONSES},
    ),
    Endpoint("GET", "/health", health, _ERRORS, {"summary": "llama.cpp: requests are taken", "responses": RESPONSES}),
)
