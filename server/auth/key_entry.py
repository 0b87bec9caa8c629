"""One key as its file describes it."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from server.auth.key_hash import KeyHash
from server.auth.limits import Limits
from server.auth.principal import Principal


def _hash_text(text: str) -> str:
    KeyHash.parse(text)
    return text


# Part of cache salts and of ids: without the separator, and printable in logs and metrics.
Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class KeyEntry(BaseModel):
    """``tenant``: keys of one tenant share prefix cache, sessions and draft texts; others never see them.
    ``admin``: may call AdminService."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: Name
    tenant: Name
    hash: Annotated[str, AfterValidator(_hash_text)]
    admin: bool = False
    limits: Limits = Limits()

    def principal(self) -> Principal:
        """Who holds it."""
        return Principal(self.name, self.tenant, self.limits, self.admin)
