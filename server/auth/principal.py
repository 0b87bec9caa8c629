"""Who makes a call."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field

from server.auth.limits import Limits
from specdec.types import Request

# No tenant's name holds it, so no two tenants' salts, and no salt of nobody's, ever read alike.
SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key. ``name`` is the key's, ``tenant`` whose data it may see; both empty without keys."""

    name: str = ""
    tenant: str = ""
    limits: Limits = field(default_factory=Limits)
    admin: bool = False

    def scoped(self, text: str) -> str:
        """``text`` as a name that no other tenant can say."""
        return f"{self.tenant}{SEPARATOR}{text}" if self.tenant else text

    def own(self, request: Request) -> Request:
        """``request`` as this principal may make it: id and cache salt of its tenant, priority within its limit.

        The salt is what prefix cache, sessions and shared draft texts are kept by.
        """
        ceiling = self.limits.max_priority
        priority = request.priority if ceiling is None else min(request.priority, ceiling)
        if not self.tenant and priority == request.priority:
            return request
        return dataclasses.replace(
            request,
            request_id=self.scoped(request.request_id),
            cache_salt=self.scoped(request.cache_salt),
            priority=priority,
        )


ANYBODY = Principal()
"""Who calls a server that asks for no key."""
