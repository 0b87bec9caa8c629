"""Everything Ollama's dialect serves, and how its bodies look."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.endpoint import Endpoint
from server.http.fields.schema import (
    COMMON,
    COUNT,
    FLAG,
    OBJECT,
    PREDICTION,
    RESPONSES,
    SAMPLING,
    STOPPING,
    TEXT,
    Schema,
    json_operation,
)
from server.http.ollama.chat import chat
from server.http.ollama.errors import OllamaErrors
from server.http.ollama.generate import generate
from server.http.ollama.models import running, show, tags
from server.http.ollama.options import DEFAULTS
from server.http.ollama.probes import alive, version

OPTION_FIELDS: Mapping[str, Schema] = {
    **SAMPLING,
    **{name: {**SAMPLING[name], "default": value} for name, value in DEFAULTS.items()},
    **STOPPING,
    "num_predict": {
        "type": "integer", "minimum": -2, "default": -1,
        "description": "Negative: up to the context. 0: only compute the prompt into the prefix cache.",
    },
    "repeat_penalty": {"type": "number", "exclusiveMinimum": 0, "default": 1},
    "repeat_last_n": {"type": "integer", "minimum": -1, "description": "0 turns repeat_penalty off."},
}  # fmt: skip
_MODEL: Mapping[str, Schema] = {
    "model": {**TEXT, "description": "None, or the one served."},
    "name": {**TEXT, "description": "The same, as older clients have it."},
}
_SHARED: Mapping[str, Schema] = {
    **_MODEL,
    "stream": {**FLAG, "default": True},
    "format": {"oneOf": [{"enum": ["json", ""]}, {**OBJECT, "description": "A JSON schema."}]},
    "options": {"type": "object", "properties": dict(OPTION_FIELDS)},
    **PREDICTION,
    **COMMON,
}
_IMAGES: Schema = {"type": "array", "maxItems": 0}
GENERATE_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "prompt": {**TEXT, "description": "None: nothing is generated."},
    "suffix": {**TEXT, "description": "What follows the gap that is to be filled."},
    "system": TEXT,
    "template": {**TEXT, "description": "Ignored: the model's own counts."},
    "context": {"type": "array", "items": COUNT, "description": "What an earlier answer told."},
    "raw": {**FLAG, "description": "Take the prompt as it is, special tokens included."},
    "images": _IMAGES,
}
CHAT_FIELDS: Mapping[str, Schema] = {
    **_SHARED,
    "messages": {
        "type": "array",
        "description": "None: nothing is generated.",
        "items": {
            "type": "object",
            "required": ["role"],
            "properties": {"role": {**TEXT, "minLength": 1}, "content": TEXT, "images": _IMAGES},
        },
    },
    "tools": {"type": "array", "items": {"type": "object", "properties": {"function": OBJECT}}},
    "tool_choice": {"enum": ["auto", "none"]},
}

_ERRORS = OllamaErrors()
OLLAMA = (
    Endpoint("POST", "/api/generate", generate, _ERRORS, json_operation("Ollama: continue a text", GENERATE_FIELDS)),
    Endpoint("POST", "/api/chat", chat, _ERRORS, json_operation("Ollama: answer in a conversation", CHAT_FIELDS)),
    Endpoint("POST", "/api/show", show, _ERRORS, json_operation("Ollama: what the model can do", _MODEL)),
    Endpoint("GET", "/api/tags", tags, _ERRORS, {"summary": "Ollama: the model served", "responses": RESPONSES}),
    Endpoint("GET", "/api/ps", running, _ERRORS, {"summary": "Ollama: the model loaded", "responses": RESPONSES}),
    Endpoint("GET", "/api/version", version, _ERRORS, {"summary": "Ollama: the API's level", "responses": RESPONSES}),
    Endpoint("GET", "/", alive, _ERRORS, {"summary": "Ollama: a server is there", "responses": RESPONSES}),
)
