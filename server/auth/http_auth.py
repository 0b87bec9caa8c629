"""Keys on HTTP, whatever the dialect: a path and headers to a caller."""

from __future__ import annotations

from collections.abc import Mapping

from server.auth.access import Access
from server.auth.principal import ANYBODY, Principal

# Asked by probes, which have no key.
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health", "/v1/health", "/version"})


async def http_caller(access: Access, path: str, headers: Mapping[str, str]) -> Principal:
    """Who sent a request for ``path`` with ``headers``, whose names are lower-case or found in any case.

    Editors and SDKs send ``Authorization: Bearer KEY``; some send ``x-api-key: KEY`` too, or only that.

    Raises:
        UnauthenticatedError: a key is needed and there is none, or it is not known; 401 with ``WWW-Authenticate``.
        KeyChecksBusyError: too many keys are being checked; 429.
    """
    if access.open_health and path in HEALTH_PATHS:
        return ANYBODY
    return await access.caller(headers.get("authorization"), headers.get("x-api-key"))
