"""The folder of a fleet: private to its owner, used by one `specdec cluster serve` at a time, with bounded logs.

It holds keys, and the fleet acts on its content, so no other user may write to it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ValidationError

from cluster.config import ClusterConfig
from cluster.deployment import Deployment
from cluster.fleet import Fleet
from specdec.config import problems
from specdec.errors import ConfigError

LOG_BYTES = 16 << 20  # size at which a log is rotated
_TAIL_BYTES = 2000  # of a log that an error quotes


class FleetState(BaseModel):
    """What a restarted reconciler continues from. JSON, so that reading it runs no code."""

    config: ClusterConfig
    deployments: dict[str, Deployment]  # by Serve application; with the keys for /v1/loads
    fleet: Fleet

    def encoded(self) -> bytes:
        """The content of its file."""
        return self.model_dump_json(indent=1).encode()

    @classmethod
    def load(cls, path: Path) -> FleetState:
        """Reads the state at ``path``.

        Raises:
            ConfigError: another user may have written it, or it cannot be read.
        """
        try:
            _refuse_other_writers(path, "delete it if you do not know who wrote it")
            return cls.model_validate_json(path.read_bytes())
        except OSError as error:
            raise ConfigError(f"{path} cannot be read ({error.strerror})") from None
        except ValidationError as error:
            raise ConfigError(f"{path}: {problems(error, cls)}") from None


def private_folder(path: Path) -> Path:
    """Returns ``path``. Creates it with mode 0700 if it is missing; an existing one keeps its mode.

    Raises:
        ConfigError: it cannot be created, belongs to another user, or others may write to it.
    """
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {path} cannot be created ({error.strerror})") from None
    _refuse_other_writers(path, "give the fleet a `folder` of its own")
    return path


def replace_files(contents: Mapping[Path, bytes]) -> list[Path]:
    """Writes files with mode 0600, in order; returns those whose content changed.

    All contents are written to temporary files first and renamed then, so a full disk changes no file, and a reader
    sees either the old or the new content.

    Raises:
        OSError: a file cannot be written; no temporary file is left.
    """
    staged: dict[Path, str] = {}
    try:
        for path, content in contents.items():
            with contextlib.suppress(OSError):  # it is missing, or cannot be read
                if path.read_bytes() == content:
                    continue
            path.parent.mkdir(parents=True, exist_ok=True)
            handle, staged[path] = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
            with os.fdopen(handle, "wb") as file:
                file.write(content)
        for path, temporary in staged.items():
            os.replace(temporary, path)
    finally:
        for temporary in staged.values():
            Path(temporary).unlink(missing_ok=True)
    return list(staged)


def _refuse_other_writers(path: Path, remedy: str) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to the user {found.st_uid}, not to {os.geteuid()}; {remedy}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"other users may write to {path}; chmod go-w {path}, or {remedy}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Holds the lock of ``folder`` until the context ends or the process dies.

    Raises:
        ConfigError: another process holds it.
    """
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"folder: {folder} is in use by another `specdec cluster serve` (process {file.read() or 'unknown'}); "
                "stop that one, or give this fleet its own `folder` and ports"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process holds the lock of ``folder``."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass  # there is no such folder
    return False


def bound_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Copies a log larger than ``limit`` bytes to ``path.1`` and truncates it. Its writer continues; a line written
    meanwhile may be lost."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            with contextlib.suppress(OSError):  # truncate it even if the disk has no room for the copy
                shutil.copy(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)


def log_tail(path: Path, begin: int = 0) -> str:
    """The end of a log, for an error to quote: of what was written after its first ``begin`` bytes, unless the log was
    truncated since. It may have been deleted to free the disk."""
    try:
        with path.open("rb") as log:
            end = log.seek(0, os.SEEK_END)
            log.seek(max(0 if begin > end else begin, end - _TAIL_BYTES))
            return log.read().decode("utf-8", "replace").strip() or "its log is empty"
    except OSError as error:
        return f"its log cannot be read ({error.strerror})"
