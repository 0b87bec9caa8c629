"""Bearer keys: their hashes, the file that lists them, and the loaded keys."""

from __future__ import annotations

import asyncio
import base64
import binascii
import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from server.auth.file_watch import FileWatch
from server.auth.principal import Limits, Principal
from server.errors import KEYS_FILE, FileErrors, KeyChecksBusyError, UnauthenticatedError
from specdec.config import load_yaml
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)

KEY_PREFIX = "sd-"
_KEY_BYTES = 32
_SALT_BYTES = 16
_SCRYPT_COST = (1 << 14, 8, 1)  # n, r, p: 16 MiB and about 50 ms
_MAX_SCRYPT_BYTES = 256 << 20


@dataclass(frozen=True, slots=True)
class KeyHash:
    """``sha256:HEX`` for generated keys, ``scrypt:N:R:P:SALT:HASH`` (base64) for keys that people choose."""

    digest: bytes  # the hash itself, 32 bytes
    salt: bytes = b""  # scrypt only
    cost: tuple[int, int, int] = (0, 0, 0)  # n, r, p of scrypt

    @property
    def slow(self) -> bool:
        """Whether `matches` takes tens of milliseconds and megabytes."""
        return bool(self.salt)

    def matches(self, key: str) -> bool:
        """Whether this is the hash of ``key``, in constant time."""
        return hmac.compare_digest(self.digest, self._hash(key) if self.slow else fast_digest(key))

    def __str__(self) -> str:
        if not self.slow:
            return f"sha256:{self.digest.hex()}"
        return ":".join(["scrypt", *map(str, self.cost), _base64(self.salt), _base64(self.digest)])

    @staticmethod
    def parse(text: str) -> KeyHash:
        """The inverse of ``str``.

        Raises:
            ValueError: ``text`` is not a hash.
        """
        try:
            match text.split(":"):
                case ["sha256", digest] if len(digest) == 64:
                    return KeyHash(bytes.fromhex(digest))
                case ["scrypt", n, r, p, salt, digest]:
                    return _checked(KeyHash(_from_base64(digest), _from_base64(salt), (int(n), int(r), int(p))))
        except (ValueError, binascii.Error):
            pass  # refused like any other form
        raise ValueError("must be sha256:HEX or scrypt:N:R:P:SALT:HASH, as `specdec keys new` prints it")

    @staticmethod
    def of(key: str, *, slow: bool = False) -> KeyHash:
        if not slow:
            return KeyHash(fast_digest(key))
        salt = secrets.token_bytes(_SALT_BYTES)
        return KeyHash(KeyHash(b"", salt, _SCRYPT_COST)._hash(key), salt, _SCRYPT_COST)

    def _hash(self, key: str) -> bytes:
        n, r, p = self.cost
        return hashlib.scrypt(
            key.encode("utf-8", "surrogatepass"), salt=self.salt, n=n, r=r, p=p, maxmem=_MAX_SCRYPT_BYTES * 2, dklen=32
        )


def fast_digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


def new_key() -> str:
    """A random key of 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def _checked(found: KeyHash) -> KeyHash:
    n, r, p = found.cost
    sound = n > 1 and n & (n - 1) == 0 and r > 0 and 0 < p <= 16 and 128 * n * r <= _MAX_SCRYPT_BYTES
    if not sound or len(found.digest) != 32 or len(found.salt) < 8:
        raise ValueError("scrypt: N must be a power of two, 128 N R at most 256 MiB, the hash 32 bytes, the salt 8")
    return found


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode("ascii")


def _from_base64(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


def _hash_text(text: str) -> str:
    KeyHash.parse(text)
    return text


# A part of cache salts and ids, so it must not contain the separator; printable in logs and metrics.
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class KeyEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: KeyName
    tenant: KeyName  # keys of one tenant share prefix cache, sessions and draft texts; tenants never share
    hash: Annotated[str, AfterValidator(_hash_text)]
    admin: bool = False  # may call AdminService
    limits: Limits = Limits()
    indexes: tuple[str, ...] | None = None  # names in `engine.indexes` that may be drafted from; None: all

    def principal(self) -> Principal:
        return Principal(self.name, self.tenant, self.limits, self.admin, self.indexes)


_ENTRIES = TypeAdapter(list[KeyEntry])


END_MARK = "# end of keys"
"""The last line of a keys file, by which a version that was cut off is recognised."""


def _read(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.keys_file: {path} cannot be read ({error})") from None


def _ends(text: str) -> bool:
    return text.rstrip("\n").rpartition("\n")[2] == END_MARK and text.endswith("\n")


def add_key(path: Path, entry: KeyEntry) -> None:
    """Append ``entry`` to the file at ``path``, which is created readable by its owner only. Existing text, comments
    included, is kept. The file is replaced atomically, so a running server reads the old or the new version.

    Raises:
        ConfigError: the file is not a list of keys, has an entry of this name, or cannot be written.
    """
    path = path.expanduser()
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else "# keys of a specdec server, by hash\n"
        before = _parse(old, path)
        values: list[dict[str, Any]] = [entry.model_dump(exclude_defaults=True)]
        body = old.removesuffix(END_MARK + "\n") if _ends(old) else old
        new = body + ("" if body.endswith("\n") else "\n") + yaml.safe_dump(values, sort_keys=False) + END_MARK + "\n"
        if _parse(new, path) != [*before, entry]:
            raise ConfigError(f"{path}: write its keys as a plain list (`- name: ...`), so that one can be added")
        _replace(path, new)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be changed ({error})") from None


def _parse(text: str, path: Path) -> list[KeyEntry]:
    try:
        entries = _ENTRIES.validate_python(load_yaml(text) or [])
    except ValidationError as error:
        # The message must not contain values: one may be a key, pasted instead of its hash.
        lines = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_input=False)]
        raise ConfigError(f"server.keys_file: {path}: " + "; ".join(lines)) from None
    except yaml.YAMLError as error:
        raise ConfigError(f"server.keys_file: {path} is not valid YAML: {error}") from None
    for field in ("name", "hash"):
        values = [getattr(entry, field) for entry in entries]
        twice = [entry.name for i, entry in enumerate(entries) if values[i] in values[:i]]
        if twice:
            raise ConfigError(f"server.keys_file: {path}: entry {twice[0]!r} has the {field} of another; rename it")
    return entries


def _replace(path: Path, text: str) -> None:
    former = path.stat() if path.exists() else None
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        if former is not None:
            with contextlib.suppress(PermissionError):  # only root may give a file to another owner
                os.chown(temporary, former.st_uid, former.st_gid)
        os.chmod(temporary, 0o600 if former is None else former.st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


SLOW_CHECKS = 8  # checks of slow hashes that may wait at a time
_BUSY_RETRY_S = 1.0


@dataclass(slots=True)
class _Key:
    principal: Principal
    hash: KeyHash
    digest: bytes | None  # SHA-256 of the key; None for a slow hash until the key was used once


class KeyRing:
    """Loads the keys at ``path``, and again when the file changes. An invalid or incomplete version leaves the keys
    unchanged; it is logged and counted.

    Raises:
        ConfigError: the file is invalid at start, or contains no key.
    """

    def __init__(self, path: Path, watch: FileWatch | None = None, file_errors: FileErrors | None = None) -> None:
        self._path = path
        self._watch = watch or FileWatch([path.expanduser()])
        self._errors: FileErrors = Counter() if file_errors is None else file_errors
        self._keys: list[_Key] = []
        self._text = _read(path)  # of the loaded version
        entries = _parse(self._text, path)
        if not entries:
            raise ConfigError(f"server.keys_file: {path} contains no key; create one with `specdec keys new`")
        self._adopt(entries)
        self._slow = asyncio.Lock()
        self._slow_checks = 0

    async def find(self, key: str) -> Principal:
        """The principal of ``key``.

        Raises:
            UnauthenticatedError: the key is unknown.
            KeyChecksBusyError: the key may have a slow hash, and too many are being checked.
        """
        self._refresh()
        digest = fast_digest(key)
        found = self._by_digest(digest)
        if found is None and any(known.digest is None for known in self._keys):
            found = await self._by_slow_hash(key, digest)
        if found is None:
            raise UnauthenticatedError("unknown key; ask the operator for one (`specdec keys new`)")
        return found.principal

    def _by_digest(self, digest: bytes) -> _Key | None:
        found = None
        for known in self._keys:  # always all of them: the time must not depend on the key
            if known.digest is not None and hmac.compare_digest(known.digest, digest):
                found = known
        return found

    async def _by_slow_hash(self, key: str, digest: bytes) -> _Key | None:
        if self._slow_checks >= SLOW_CHECKS:
            raise KeyChecksBusyError(_BUSY_RETRY_S)
        self._slow_checks += 1
        try:
            async with self._slow:
                if (seen := self._by_digest(digest)) is not None:  # a concurrent call checked the same key
                    return seen
                hashes = [known.hash for known in self._keys if known.digest is None]
                matched = [found for found in hashes if await asyncio.to_thread(found.matches, key)]
                for known in self._keys:  # the file may have changed during the check
                    if known.hash in matched:
                        known.digest = digest
                return self._by_digest(digest)
        finally:
            self._slow_checks -= 1

    def _refresh(self) -> None:
        if not self._watch.changed():
            return
        try:
            text = _read(self._path)
            entries = _parse(text, self._path)
            if not _ends(text) and (_ends(self._text) or not entries):
                raise ConfigError(f"server.keys_file: {self._path} may be cut off: it does not end with `{END_MARK}`")
        except ConfigError as error:
            self._errors[KEYS_FILE] += 1
            _LOG.error("%s; keeping the previous keys", error)
            return
        self._text = text
        self._adopt(entries)
        _LOG.info("%s: loaded %d keys", self._path, len(entries))

    def _adopt(self, entries: list[KeyEntry]) -> None:
        seen = {str(known.hash): known.digest for known in self._keys}
        self._keys = [_key(entry, seen.get(entry.hash)) for entry in entries]


def _key(entry: KeyEntry, seen: bytes | None) -> _Key:
    found = KeyHash.parse(entry.hash)
    return _Key(entry.principal(), found, seen if found.slow else found.digest)
