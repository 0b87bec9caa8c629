"""Files of keys for tests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from server.auth.keys import KeyEntry, _parse, _read, add_key, key_hash, new_key
from server.auth.principal import Limits


def make_key(
    path: Path,
    name: str,
    tenant: str = "team",
    *,
    admin: bool = False,
    indexes: tuple[str, ...] | None = None,
    **limits: Any,
) -> str:
    """Add a key to the file at ``path``; returns the key itself."""
    key = new_key()
    limited = Limits(**limits)
    add_key(path, KeyEntry(name=name, tenant=tenant, hash=key_hash(key), admin=admin, indexes=indexes, limits=limited))
    return key


def read_keys(path: Path) -> list[KeyEntry]:
    """Every key in the file at ``path``, or the error of a server that starts with it."""
    return _parse(_read(path), path)
