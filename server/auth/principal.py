"""Callers, their limits, and the check for operators."""

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
    """The limits of a key; None: unlimited. Tokens count prompts and outputs. A call that starts within the limit may
    exceed it; later calls then wait for the difference."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    requests_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    tokens_per_minute: float | None = Field(None, gt=0, allow_inf_nan=False)
    max_concurrent: int | None = Field(None, ge=1)
    max_priority: int | None = None  # requests above it run at this priority


# Tenant names do not contain it, so scoped names of two tenants always differ.
SEPARATOR = "/"


@dataclass(frozen=True, slots=True)
class Principal:
    name: str = ""  # of the key; empty without keys
    tenant: str = ""  # owner of the data that it may access; empty without keys
    limits: Limits = field(default_factory=Limits)
    admin: bool = False
    indexes: tuple[str, ...] | None = None  # indexes that may be drafted from; None: all

    def scoped(self, text: str) -> str:
        """``text`` as a name that other tenants cannot produce."""
        return f"{self.tenant}{SEPARATOR}{text}" if self.tenant else text

    def scope_request(self, request: Request) -> Request:
        """``request`` with the tenant's id and cache salt, the allowed priority and the allowed indexes. Prefix cache,
        sessions and shared draft texts are keyed by the salt.

        Raises:
            PermissionDeniedError: the request names an index that this principal may not use.
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
        """The ``names`` that this principal may not draft from, sorted."""
        return [] if self.indexes is None else sorted(set(names) - set(self.indexes))

    def _with_own_indexes(self, request: Request) -> Request:
        if self.indexes is None:
            return request
        asked = request.speculation.indexes
        if denied := self.denied_indexes(asked or ()):
            raise PermissionDeniedError(
                f"speculation.indexes: this key may not use {', '.join(denied)}; leave it out, or add it to the key's "
                "`indexes` in the server's keys_file"
            )
        speculation = dataclasses.replace(
            request.speculation, indexes=self.indexes[:MAX_INDEXES] if asked is None else asked
        )
        return dataclasses.replace(request, speculation=speculation)


ANYBODY = Principal()
"""The caller of a server without keys."""


_CALLER: ContextVar[Principal] = ContextVar("caller", default=ANYBODY)


def set_caller(principal: Principal) -> None:
    """For the rest of this task and the tasks it starts."""
    _CALLER.set(principal)


def current_caller() -> Principal:
    """The caller; `ANYBODY` on a server without keys."""
    return _CALLER.get()


def check_admin(what: str) -> None:
    """Check that the caller is an operator. what: the call that only operators may make.

    Raises:
        PermissionDeniedError: the caller's key is not marked as one.
    """
    if not current_caller().admin:
        raise PermissionDeniedError(
            f"only a key marked `admin: true` in the server's keys_file may call {what}; create one with "
            "`specdec keys new --admin`"
        )
