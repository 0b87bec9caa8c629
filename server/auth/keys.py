"""Bearer keys: their hashes, the file that lists them, and the loaded keys."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import os
import re
import secrets
import threading
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from server.auth.file_watch import FileWatch
from server.auth.principal import Limits, Principal
from server.errors import KEYS_FILE, FileErrors, UnauthenticatedError
from specdec.atomic_file import replacing
from specdec.config import load_yaml, problems, read_text
from specdec.errors import ConfigError

_LOG = logging.getLogger(__name__)

KEY_PREFIX = "sd-"
_KEY_BYTES = 32
_HASH = re.compile(r"sha256:[0-9a-f]{64}")


def new_key() -> str:
    """A random key of 256 bits."""
    return KEY_PREFIX + secrets.token_urlsafe(_KEY_BYTES)


def key_hash(key: str) -> str:
    """What a keys file stores of ``key``: ``sha256:HEX``. A fast hash is enough: 256 random bits cannot be guessed."""
    return "sha256:" + hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def _checked_hash(text: str) -> str:
    found = text.lower()
    if not _HASH.fullmatch(found):
        raise ValueError("must be sha256:HEX; make a new key with `specdec keys new`, which writes its hash")
    return found


# A part of cache salts and ids, so it must not contain the separator; printable in logs and metrics.
KeyName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}$")]


class KeyEntry(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    name: KeyName
    tenant: KeyName  # keys of one tenant share prefix cache, sessions and draft texts; tenants never share
    hash: Annotated[str, AfterValidator(_checked_hash)]
    admin: bool = False  # may call AdminService
    limits: Limits = Limits()
    indexes: tuple[str, ...] | None = None  # names in `engine.indexes` that may be drafted from; None: all

    def principal(self) -> Principal:
        return Principal(self.name, self.tenant, self.limits, self.admin, self.indexes)


_ENTRIES = TypeAdapter(list[KeyEntry])


END_MARK = "# end of keys"
"""The last line of a keys file, by which a version that was cut off is recognised."""


def _read(path: Path) -> str:
    return read_text(path, f"server.keys_file: {path}")


def _ends(text: str) -> bool:
    return text.rstrip("\n").rpartition("\n")[2] == END_MARK and text.endswith("\n")


def add_key(path: Path, entry: KeyEntry) -> None:
    """Append ``entry`` to the file at ``path``, which is created readable by its owner only. Existing text, comments
    included, is kept. The file is replaced atomically, so a running server reads the old or the new version.

    Raises:
        ConfigError: the file is not a list of keys, has an entry of this name, or cannot be written.
    """
    path = Path(os.path.expanduser(path))
    old = _read(path) if os.path.exists(path) else "# keys of a specdec server, by hash\n"
    before = _parse(old, path)
    values: list[dict[str, Any]] = [entry.model_dump(exclude_defaults=True)]
    body = old.removesuffix(END_MARK + "\n") if _ends(old) else old
    new = body + ("" if body.endswith("\n") else "\n") + yaml.safe_dump(values, sort_keys=False) + END_MARK + "\n"
    if _parse(new, path) != [*before, entry]:
        raise ConfigError(f"{path}: write its keys as a plain list (`- name: ...`), so that one can be added")
    try:
        with replacing(path) as file:
            file.write(new.encode())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be changed ({error.strerror})") from None


def _parse(text: str, path: Path) -> list[KeyEntry]:
    try:
        entries = _ENTRIES.validate_python(load_yaml(text) or [])
    except ValidationError as error:
        # The message must not contain values: one may be a key, pasted instead of its hash.
        raise ConfigError(f"server.keys_file: {path}: {problems(error, list[KeyEntry])}") from None
    except yaml.YAMLError as error:
        raise ConfigError(f"server.keys_file: {path} is not valid YAML: {error}") from None
    for field in ("name", "hash"):
        values = [getattr(entry, field) for entry in entries]
        twice = [entry.name for i, entry in enumerate(entries) if values[i] in values[:i]]
        if twice:
            raise ConfigError(f"server.keys_file: {path}: {twice[0]!r} has the {field} of another; give it its own")
    return entries


class KeyRing:
    """Loads the keys at ``path``, and again when the file changes. An invalid or incomplete version leaves the keys
    unchanged; it is logged and counted. Belongs to one event loop.

    Raises:
        ConfigError: the file is invalid at start, or contains no key.
    """

    def __init__(self, path: Path, watch: FileWatch | None = None, file_errors: FileErrors | None = None) -> None:
        self._path = path
        self._watch = watch or FileWatch([path])
        self._errors: FileErrors = Counter() if file_errors is None else file_errors
        self._text = _read(path)  # of the loaded version
        entries = _parse(self._text, path)
        if not entries:
            raise ConfigError(f"server.keys_file: {path} contains no key; create one with `specdec keys new`")
        self._keys = _by_hash(entries)
        self._loading = asyncio.Lock()
        self._one_load = threading.Lock()  # a call that is cancelled leaves its load behind

    async def find(self, key: str) -> Principal:
        """The principal of ``key``. A changed file is loaded first, in a thread: thousands of keys take seconds.

        Raises:
            UnauthenticatedError: the key is unknown.
        """
        async with self._loading:
            if self._watch.changed():
                await asyncio.shield(asyncio.to_thread(self._load))
        found = self._keys.get(key_hash(key))  # its time depends on hashes, which say nothing of a key
        if found is None:
            raise UnauthenticatedError("unknown key; ask the operator for one (`specdec keys new`)")
        return found

    def _load(self) -> None:
        with self._one_load:  # the last to begin reads the newest file
            try:
                text = _read(self._path)
                entries = _parse(text, self._path)
                if not _ends(text) and (_ends(self._text) or not entries):
                    raise ConfigError(
                        f"server.keys_file: {self._path} may be cut off: it does not end with `{END_MARK}`"
                    )
            except ConfigError as error:
                self._errors[KEYS_FILE] += 1
                _LOG.error("%s; keeping the previous keys", error)
                return
            self._text = text
            self._keys = _by_hash(entries)
        _LOG.info("%s: loaded %d keys", self._path, len(entries))


def _by_hash(entries: list[KeyEntry]) -> dict[str, Principal]:
    return {entry.hash: entry.principal() for entry in entries}
