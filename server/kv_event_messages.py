"""Events of the prefix cache as routers read them: vLLM's, their fields by name or, as before vLLM#42892, by place."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgpack

from specdec.core.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

Form = Literal["map", "positional"]
# Routers weigh the tiers of a cache against each other. What the engine computes from is the first, wherever that is.
_MEDIUM = "GPU"
_RANK = 0


def block_hash(key: bytes) -> int:
    """A page's key as routers know it: an unsigned number of 64 bits."""
    return int.from_bytes(key[-8:], "big")


def pack_batch(events: Sequence[CacheEvent], form: Form) -> bytes:
    """The payload of one message: ``[time, events, rank]`` in msgpack."""
    made = [_fields(event) for event in events]
    if form == "map":
        return _packed([{"type": kind, **fields} for kind, fields in made])
    return _packed([[kind, *fields.values()] for kind, fields in made])


def pack_cleared(form: Form) -> bytes:
    """The payload that says that nothing is cached."""
    return pack_batch([CacheCleared()], form)


def _packed(events: list[Any]) -> bytes:
    packed: bytes = msgpack.packb([time.time(), events, _RANK], use_bin_type=True)
    return packed


def _fields(event: CacheEvent) -> tuple[str, dict[str, Any]]:
    """The kind, and its fields in the order of vLLM's positional form."""
    match event:
        case BlocksStored(keys, parent, tokens, salt):
            fields: dict[str, Any] = {
                "block_hashes": [block_hash(key) for key in keys],
                "parent_block_hash": None if parent is None else block_hash(parent),
                "token_ids": tokens,
                "block_size": len(tokens) // len(keys),
                "lora_id": None,
                "medium": _MEDIUM,
                "lora_name": None,
            }
            if salt and parent is None:  # as vLLM: the first block of a chain names what sets it apart
                from specdec.core.kv_cache import (
                    root_key,  # there already where pages are made; the front end makes none
                )

                fields["extra_keys"] = [[root_key(salt).hex()], *[None] * (len(keys) - 1)]
            return "BlockStored", fields
        case BlocksRemoved(keys):
            return "BlockRemoved", {"block_hashes": [block_hash(key) for key in keys], "medium": _MEDIUM}
        case CacheCleared():
            return "AllBlocksCleared", {}
