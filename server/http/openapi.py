"""The OpenAPI document of all dialects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import specdec
from server.http.endpoint import Endpoint


def openapi_document(endpoints: Iterable[Endpoint]) -> dict[str, Any]:
    """OpenAPI 3.1. Where dialects share a path, a body may be that of any; the rest is told of the one that takes
    whatever the others leave."""
    paths: dict[str, dict[str, Any]] = {}
    for endpoint in endpoints:
        path = endpoint.path.replace(":path}", "}")
        here, method = paths.setdefault(path, {}), endpoint.method.lower()
        here[method] = _joined(here[method], endpoint.operation) if method in here else endpoint.operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "specdec", "version": specdec.__version__},
        "paths": paths,
    }


def _joined(first: Mapping[str, Any], last: Mapping[str, Any]) -> Mapping[str, Any]:
    """``last``, which takes the bodies of ``first`` too."""
    bodies = [operation.get("requestBody") for operation in (first, last)]
    if None in bodies:
        return last
    schemas = [body["content"]["application/json"]["schema"] for body in bodies if body is not None]
    schemas = [*schemas[0].get("anyOf", [schemas[0]]), schemas[1]]
    return {**last, "requestBody": {"required": True, "content": {"application/json": {"schema": {"anyOf": schemas}}}}}
