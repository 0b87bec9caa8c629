"""Prefix cache events in vLLM's format: fields by name or, as before vLLM#42892, by position."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, Literal

import msgpack

from specdec.core.cache_events import BlocksRemoved, BlocksStored, CacheCleared, CacheEvent

Form = Literal["map", "positional"]
# Routers weigh the tiers of a cache against each other. The pages that the engine computes from are the first tier.
_MEDIUM = "GPU"
_RANK = 0


def block_hash(key: bytes) -> int:
    """A page's key in routers' form: an unsigned 64-bit integer."""
    return int.from_bytes(key[-8:], "big")


def pack_batch(events: Sequence[CacheEvent], form: Form) -> bytes:
    """The payload of one message: ``[time, events, rank]`` in msgpack."""
    named = [_fields(event) for event in events]
    made = [{"type": kind, **fields} if form == "map" else [kind, *fields.values()] for kind, fields in named]
    packed: bytes = msgpack.packb([time.time(), made, _RANK], use_bin_type=True)
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
            if salt and parent is None:  # as in vLLM: the first block of a chain carries its salt
                # Imported here because the front end, which never packs blocks, needs no KV cache.
                from specdec.core.kv_cache import root_key

                fields["extra_keys"] = [[root_key(salt).hex()], *[None] * (len(keys) - 1)]
            return "BlockStored", fields
        case BlocksRemoved(keys):
            return "BlockRemoved", {"block_hashes": [block_hash(key) for key in keys], "medium": _MEDIUM}
        case CacheCleared():
            return "AllBlocksCleared", {}
