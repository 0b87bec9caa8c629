"""Streams of JSON objects, one a line."""

from __future__ import annotations

from typing import Any

from server.http.json_codec import write_json

MEDIA_TYPE = b"application/x-ndjson"


def ndjson(value: Any) -> bytes:
    """``value`` as one line."""
    return write_json(value) + b"\n"
