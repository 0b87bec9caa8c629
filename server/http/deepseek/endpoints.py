"""What DeepSeek's dialect serves: OpenAI's completions, which fill gaps, at a path of its own."""

from __future__ import annotations

from server.http.endpoint import Endpoint
from server.http.fields.schema import json_operation
from server.http.openai.completions import complete
from server.http.openai.endpoints import COMPLETION_FIELDS
from server.http.openai.errors import OpenAIErrors

DEEPSEEK = (
    Endpoint(
        "POST",
        "/beta/completions",
        complete,
        OpenAIErrors(),
        json_operation("DeepSeek: fill a gap", COMPLETION_FIELDS, ("prompt",)),
    ),
)
