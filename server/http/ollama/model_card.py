"""What Ollama's clients are told about the model served."""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime
from typing import Any

from server.http.face import Face

FAMILY = "specdec"


def details(face: Face) -> dict[str, Any]:
    """What it is made of, as far as that is known here."""
    return {
        "parent_model": "",
        "format": FAMILY,
        "family": FAMILY,
        "families": [FAMILY],
        "parameter_size": "",
        "quantization_level": face.info.dtype,
    }


def card(face: Face) -> dict[str, Any]:
    """One entry of a list of models. ``digest`` tells models apart, and changes with what decides about tokens."""
    name = face.info.target
    return {
        "name": name,
        "model": name,
        "modified_at": started(face),
        "size": 0,
        "digest": hashlib.sha256(f"{name}\n{face.fingerprint}".encode()).hexdigest(),
        "details": details(face),
    }


def started(face: Face) -> str:
    """When the server began to serve it."""
    return datetime.fromtimestamp(face.started_s, UTC).isoformat().replace("+00:00", "Z")
