"""Everything Tabby's dialect serves, and how its bodies look."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.endpoint import Endpoint
from server.http.fields.schema import COMMON, COUNT, FLAG, NUMBER, RESPONSES, TEXT, Schema, json_operation
from server.http.openai.errors import OpenAIErrors
from server.http.tabby.completion_ask import STANDARD, is_tabbys
from server.http.tabby.completions import complete
from server.http.tabby.events import log_event
from server.http.tabby.health import health, server_setting

_SNIPPETS: Schema = {
    "type": "array",
    "items": {"type": "object", "properties": {"filepath": TEXT, "body": TEXT, "score": NUMBER}},
}
SEGMENT_FIELDS: Mapping[str, Schema] = {
    "prefix": TEXT,
    "suffix": TEXT,
    "filepath": TEXT,
    "git_url": TEXT,
    "declarations": _SNIPPETS,
    "relevant_snippets_from_changed_files": _SNIPPETS,
    "relevant_snippets_from_recently_opened_files": _SNIPPETS,
    "clipboard": TEXT,
}
COMPLETION_FIELDS: Mapping[str, Schema] = {
    "language": {**TEXT, "description": "As VS Code names it."},
    "segments": {"type": "object", "required": ["prefix"], "properties": dict(SEGMENT_FIELDS)},
    "user": {**TEXT, "description": "Also the session, where none is named."},
    "temperature": {"type": "number", "minimum": 0, "default": 0},
    "seed": {"type": "integer"},
    "mode": {"enum": [STANDARD]},
    "debug_options": {
        "type": "object",
        "properties": {
            "raw_prompt": {**TEXT, "description": "In the place of the segments."},
            "return_snippets": FLAG,
            "return_prompt": FLAG,
        },
    },
    **COMMON,
}
EVENT_FIELDS: Mapping[str, Schema] = {
    "type": {"enum": ["view", "select", "dismiss"]},
    "completion_id": {**TEXT, "minLength": 1},
    "choice_index": COUNT,
    "select_kind": {**TEXT, "description": "A part was taken over, such as a line; also as a query field."},
    "elapsed": {"type": "number", "minimum": 0, "description": "Milliseconds that it was shown for."},
    "cache_salt": {**TEXT, "description": "That of the completion, where it had one."},
}

_ERRORS = OpenAIErrors()
_HEALTH = {"summary": "Tabby: the model and the machine", "responses": RESPONSES}
_SELECT = {"name": "select_kind", "in": "query", "schema": TEXT}
TABBY = (
    Endpoint(
        "POST",
        "/v1/completions",
        complete,
        _ERRORS,
        json_operation("Tabby: fill in the middle of a text", COMPLETION_FIELDS),
        is_tabbys,
    ),
    Endpoint(
        "POST",
        "/v1/events",
        log_event,
        _ERRORS,
        {
            **json_operation("Tabby: what became of a suggestion", EVENT_FIELDS, ("type", "completion_id")),
            "parameters": [_SELECT],
        },
    ),
    Endpoint("GET", "/v1/health", health, _ERRORS, _HEALTH),
    Endpoint("POST", "/v1/health", health, _ERRORS, _HEALTH),
    Endpoint(
        "GET",
        "/v1beta/server_setting",
        server_setting,
        _ERRORS,
        {"summary": "Tabby: what clients are asked to do", "responses": RESPONSES},
    ),
)
