"""What the prefix cache knows of a prompt."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixHit:
    """Leading full pages whose KV is computed already.

    n_tokens: tokens they cover. draft_tokens: leading tokens whose draft-model KV is there too.
    """

    pages: list[int]
    n_tokens: int
    draft_tokens: int
