"""What every answer and every chunk begins with."""

from __future__ import annotations

from time import time
from typing import Any

from server.http.call import Call


def answer_head(call: Call, prefix: str, kind: str) -> dict[str, Any]:
    """Id, kind of object, time, model, and what decides about a seed's tokens."""
    return {
        "id": f"{prefix}-{call.request_id}",
        "object": kind,
        "created": int(time()),
        "model": call.face.info.target,
        "system_fingerprint": call.face.fingerprint,
    }
