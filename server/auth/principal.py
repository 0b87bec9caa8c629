"""Who makes a call, what they may use, and whether they are an operator."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from contextvars import ContextVar
from dataclasses import dataclass, field

from pydantic import BaseModel, ConfigDict, Field

from server.errors import PermissionDeniedError
from specdec.core.fields import MAX_INDEXES
from specdec.core.types import Request


class Limits(BaseModel):
    """None: no limit. Tokens are those of prompts and of outputs; a call that begins within the limit may end beyond
    it, and the next ones wait for the difference. A request above ``max_priority`` runs at that priority."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_concurrent: int | None = Field(None, ge=1)
    max_priority: int | None = None


# No tenant's name holds it, so no two tenants' salts, and no salt of nobody's, ever read alike.
SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Principal:
    """The holder of a key. ``name`` is the key's, ``tenant`` whose data it may see; both empty without keys.
    ``indexes``: the names of those that may be drafted from for it; None: any."""

    name: str = ""
    tenant: str = ""
    limits: Limits = field(default_factory=Limits)
    admin: bool = False
    indexes: tuple[str, ...] | None = None

    def scoped(self, text: str) -> str:
        """``text`` as a name that no other tenant can say."""
        return f"{self.tenant}{SEPARATOR}{text}" if self.tenant else text

    def scope_request(self, request: Request) -> Request:
        """``request`` as this principal may make it: id and cache salt of its tenant, priority within its limit, of the
        indexes those it may use.

        The salt is what prefix cache, sessions and shared draft texts are kept by.

        Raises:
            PermissionDeniedError: it asks for an index that this principal may not use.
        """
        request = self._with_own_indexes(request)
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

    def denied_indexes(self, names: Iterable[str]) -> list[str]:
        """Which of ``names`` this principal may not draft from, sorted."""
        return [] if self.indexes is None else sorted(set(names) - set(self.indexes))

    def _with_own_indexes(self, request: Request) -> Request:
        if self.indexes is None:
            return request
        asked = request.speculation.indexes
        if denied := self.denied_indexes(asked or ()):
            raise PermissionDeniedError(
                f"speculation.indexes: this key may not use {', '.join(denied)}; leave it out, or have it added to the "
                "key's `indexes` in the server's keys_file"
            )
        speculation = dataclasses.replace(
            request.speculation, indexes=self.indexes[:MAX_INDEXES] if asked is None else asked
        )
        return dataclasses.replace(request, speculation=speculation)


ANYBODY = Principal()
"""Who calls a server that asks for no key."""


_CALLER: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)


def set_caller(principal: Principal) -> None:
    """For the rest of this task, and of those it starts."""
    _CALLER.set(principal)


def current_caller() -> Principal:
    """The caller; `ANYBODY` where nobody was asked for a key."""
    return _CALLER.get()


def check_admin(what: str) -> None:
    """Raises PermissionDeniedError unless the caller's key is an operator's. what: what only operators may call."""
    if not current_caller().admin:
        raise PermissionDeniedError(
            f"only a key marked `admin: true` in the server's keys_file may call {what}; make one with "
            "`specdec keys new --admin`"
        )
