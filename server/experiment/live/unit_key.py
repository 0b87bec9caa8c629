"""Whom an arm sticks to."""

from __future__ import annotations

from hashlib import blake2b

from server.auth.principal import Principal
from server.experiment.config.assignment import Unit
from server.experiment.token_bytes import token_bytes
from specdec.types import Request


def unit_key(unit: Unit, principal: Principal, request: Request) -> str | None:
    """The key of a request, no other tenant's; None where it has none: no session, no user.

    A prompt's key is BLAKE2b (16 bytes, in hex) of its token ids as little-endian 32-bit numbers.
    """
    if unit == "request":
        return principal.scoped(request.request_id)
    if unit == "session":
        return principal.scoped(request.session) if request.session else None
    if unit == "user":
        return principal.name or None
    return blake2b(token_bytes(request.prompt_ids), digest_size=16).hexdigest()
