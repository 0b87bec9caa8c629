"""Finds what serves a path without trying patterns one by one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.applications import Starlette
from starlette.routing import Route
from starlette.types import Receive, Scope, Send


class ExactPaths(Starlette):
    """Starlette, which is asked only for what has placeholders in its path, and for refusals."""

    def __init__(self, routes: Sequence[Route], **options: Any) -> None:
        super().__init__(routes=routes, **options)
        self._served = {
            (method, route.path): route.app
            for route in reversed(routes)  # the first of several decides
            if not route.param_convertors
            for method in route.methods or ()
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        found = self._served.get((scope.get("method", ""), scope.get("path", "")))
        if found is None:
            await super().__call__(scope, receive, send)
        else:
            scope["endpoint"] = found
            await found(scope, receive, send)
