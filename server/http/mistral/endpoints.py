"""What Mistral's dialect serves."""

from __future__ import annotations

from collections.abc import Mapping

from server.http.endpoint import Endpoint
from server.http.fields.schema import TEXT, Schema, json_operation
from server.http.mistral.fim import fill
from server.http.openai.endpoints import COMPLETION_FIELDS
from server.http.openai.errors import OpenAIErrors

FIM_FIELDS: Mapping[str, Schema] = {
    **COMPLETION_FIELDS,
    "prompt": TEXT,
    "random_seed": {"type": "integer", "description": "The seed, by Mistral's name."},
}
MISTRAL = (
    Endpoint(
        "POST",
        "/v1/fim/completions",
        fill,
        OpenAIErrors(),
        json_operation("Mistral: fill a gap", FIM_FIELDS, ("prompt",)),
    ),
)
