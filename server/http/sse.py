"""Server-sent events, as OpenAI's clients read them."""

from __future__ import annotations

from typing import Any

from server.http.json_codec import write_json

MEDIA_TYPE = b"text/event-stream"
DONE = b"data: [DONE]\n\n"


def sse(value: Any) -> bytes:
    """One event whose data is ``value`` as JSON."""
    return b"data: %b\n\n" % write_json(value)
