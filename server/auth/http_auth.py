"""Keys on HTTP, whatever the dialect: a path and headers to a caller."""

from __future__ import annotations

from collections.abc import Mapping

from server.auth.access import Access
from server.auth.principal import ANYBODY, Principal

KEY_HEADERS = ("authorization", "x-api-key")
# Asked by probes, which have no key. Not Tabby's /v1/health: its agent learns there that its key is wrong.
HEALTH_PATHS = frozenset({"/livez", "/readyz", "/health", "/version"})
METRICS_PATH = "/metrics"
# A browser asks for the page before anybody can give it a key; what the page then asks needs one.
PAGE_PATHS = frozenset({"/", "/page/{name}"})


async def http_caller(access: Access, path: str, headers: Mapping[str, str]) -> Principal:
    """Who sent a request for ``path`` with ``headers``, whose names are lower-case or found in any case.

    Editors and SDKs send ``Authorization: Bearer KEY``; some send ``x-api-key: KEY`` too, or only that.

    Raises:
        UnauthenticatedError: a key is needed and there is none, or it is not known; 401 with ``WWW-Authenticate``.
        KeyChecksBusyError: too many keys are being checked; 429.
    """
    if path in PAGE_PATHS:
        return ANYBODY
    if (access.open_health and path in HEALTH_PATHS) or (access.open_metrics and path == METRICS_PATH):
        return ANYBODY
    authorization, api_key = (headers.get(name) for name in KEY_HEADERS)
    return await access.caller(authorization, api_key)
