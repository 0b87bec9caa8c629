"""The keys in force, and whose a given one is."""

from __future__ import annotations

import asyncio
import hmac
import logging
from dataclasses import dataclass
from pathlib import Path

from server.auth.auth_errors import KeyChecksBusyError, UnauthenticatedError
from server.auth.file_watch import FileWatch
from server.auth.key_entry import KeyEntry
from server.auth.key_file import read_keys
from server.auth.key_hash import KeyHash, fast_digest
from server.auth.principal import Principal
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)
SLOW_CHECKS = 8
_BUSY_RETRY_S = 1.0


@dataclass(slots=True)
class _Key:
    """``digest``: SHA-256 of the key; of one with a slow hash it is known once the key was seen."""

    principal: Principal
    hash: KeyHash
    digest: bytes | None


class KeyRing:
    """Reads the file at ``path``, and again when it changed; a bad file leaves the keys as they were, and is logged.

    Raises:
        ConfigError: the file is bad to begin with, or holds no key.
    """

    def __init__(self, path: Path, watch: FileWatch | None = None) -> None:
        self._path = path
        self._watch = watch or FileWatch([path.expanduser()])
        self._keys: list[_Key] = []
        entries = read_keys(path)
        if not entries:
            raise ConfigError(f"server.keys_file: {path} holds no key; make one with `specdec keys new`")
        self._adopt(entries)
        self._slow = asyncio.Lock()
        self._slow_checks = 0

    async def find(self, key: str) -> Principal:
        """Whose ``key`` is.

        Raises:
            UnauthenticatedError: nobody's.
            KeyChecksBusyError: it may be one with a slow hash, and too many are being checked.
        """
        self._refresh()
        digest = fast_digest(key)
        found = self._by_digest(digest)
        if found is None and any(known.digest is None for known in self._keys):
            found = await self._by_slow_hash(key, digest)
        if found is None:
            raise UnauthenticatedError("the key is not known here; ask the operator for one (`specdec keys new`)")
        return found.principal

    def _by_digest(self, digest: bytes) -> _Key | None:
        found = None
        for known in self._keys:  # all of them, so that the time taken tells nothing
            if known.digest is not None and hmac.compare_digest(known.digest, digest):
                found = known
        return found

    async def _by_slow_hash(self, key: str, digest: bytes) -> _Key | None:
        if self._slow_checks >= SLOW_CHECKS:
            raise KeyChecksBusyError(_BUSY_RETRY_S)
        self._slow_checks += 1
        try:
            async with self._slow:
                if (seen := self._by_digest(digest)) is not None:  # the one before us had the same key
                    return seen
                hashes = [known.hash for known in self._keys if known.digest is None]
                matched = [found for found in hashes if await asyncio.to_thread(found.matches, key)]
                for known in self._keys:  # those of now: the file may have changed meanwhile
                    if known.hash in matched:
                        known.digest = digest
                return self._by_digest(digest)
        finally:
            self._slow_checks -= 1

    def _refresh(self) -> None:
        if not self._watch.changed():
            return
        try:
            entries = read_keys(self._path)
        except ConfigError as error:
            _LOG.error("%s; the keys stay as they were", error)
            return
        self._adopt(entries)
        _LOG.info("%s: %d keys are in force", self._path, len(entries))

    def _adopt(self, entries: list[KeyEntry]) -> None:
        seen = {str(known.hash): known.digest for known in self._keys}
        self._keys = [_key(entry, seen.get(entry.hash)) for entry in entries]


def _key(entry: KeyEntry, seen: bytes | None) -> _Key:
    found = KeyHash.parse(entry.hash)
    return _Key(entry.principal(), found, seen if found.slow else found.digest)
