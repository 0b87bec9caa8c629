"""The OpenAPI document of all dialects."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import specdec
from server.http.endpoint import Endpoint


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1. Where dialects share a path, the one that takes whatever the others leave is described."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        paths.setdefault(path, {})[endpoint.method.lower()] = endpoint.operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": specdec.__version__},
        "paths": paths,
    }
