"""The file of keys: a YAML list, one entry per key, written by `specdec keys new` and by hand."""

from __future__ import annotations

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError

from server.auth.key_entry import KeyEntry
from specdec.errors import ConfigError

_ENTRIES = TypeAdapter(list[KeyEntry])


def read_keys(path: Path) -> list[KeyEntry]:
    """Every key in the file at ``path``.

    Raises:
        ConfigError: it can not be read, an entry is wrong, or two have one name or one hash.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"server.keys_file: {path} can not be read ({error})") from None
    return _parse(text, path)


def add_key(path: Path, entry: KeyEntry) -> None:
    """Append ``entry`` to the file at ``path``, made if need be, readable by its owner only. What is in it stays as it
    is written, comments and all; a server that reads it meanwhile sees the old file or the new one.

    Raises:
        ConfigError: the file is no list of keys, has one of this name, or can not be written.
    """
    path = path.expanduser()
    try:
        old = path.read_text(encoding="utf-8") if path.exists() else "# keys of a specdec server, by hash\n"
        before = _parse(old, path)
        values: list[dict[str, Any]] = [entry.model_dump(exclude_defaults=True)]
        new = old + ("" if old.endswith("\n") else "\n") + yaml.safe_dump(values, sort_keys=False)
        if _parse(new, path) != [*before, entry]:
            raise ConfigError(f"{path}: write its keys as a plain list (`- name: ...`), so that one can be added")
        _replace(path, new)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: can not be changed ({error})") from None


def _parse(text: str, path: Path) -> list[KeyEntry]:
    try:
        entries = _ENTRIES.validate_python(yaml.safe_load(text) or [])
    except yaml.YAMLError as error:
        raise ConfigError(f"server.keys_file: {path} is not valid YAML: {error}") from None
    except ValidationError as error:
        # An entry's values stay out of the message: one may be a key that was pasted in place of its hash.
        lines = [f"{'.'.join(map(str, e['loc'])) or 'the file'}: {e['msg']}" for e in error.errors(include_input=False)]
        raise ConfigError(f"server.keys_file: {path}: " + "; ".join(lines)) from None
    for field in ("name", "hash"):
        values = [getattr(entry, field) for entry in entries]
        twice = [entry.name for i, entry in enumerate(entries) if values[i] in values[:i]]
        if twice:
            raise ConfigError(f"server.keys_file: {path}: entry {twice[0]!r} has the {field} of another; rename it")
    return entries


def _replace(path: Path, text: str) -> None:
    mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
