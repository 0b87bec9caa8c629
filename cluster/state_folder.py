"""The folder of a fleet: its owner's alone, one `specdec cluster serve` at a time, and logs that do not grow for ever.

What lies in it is read back and acted on, and holds keys; so nobody else may write there.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
from collections.abc import Iterator
from pathlib import Path

from specdec.errors import ConfigError

LOG_BYTES = 16 << 20


def private_folder(path: Path) -> Path:
    """``path``, absolute; made for its owner alone where it is missing. One that is there keeps its mode.

    Raises:
        ConfigError: it can not be made, is somebody else's, or others may write there.
    """
    path = path.expanduser().absolute()
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"folder: {path} can not be made ({error.strerror})") from None
    _refuse_others(path, "give the fleet a `folder` of its own")
    return path


def write_private(path: Path, content: str) -> None:
    """Put ``content`` at ``path`` by one rename; only its owner can read it, from its first byte on."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # of mode 0600
    with os.fdopen(handle, "w", encoding="utf-8") as file:
        file.write(content)
    os.replace(name, path)


def read_private(path: Path) -> str:
    """What `write_private` wrote.

    Raises:
        ConfigError: somebody else may have written it.
        OSError: it can not be read.
    """
    _refuse_others(path, "delete it if you do not know who wrote it")
    return path.read_text(encoding="utf-8")


def _refuse_others(path: Path, way_out: str) -> None:
    found = path.stat()
    if found.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to the user {found.st_uid}, not to {os.geteuid()}; {way_out}")
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise ConfigError(f"{path} may be written by others; chmod go-w {path}, or {way_out}")


@contextlib.contextmanager
def locked(folder: Path) -> Iterator[None]:
    """``folder`` is this process's for as long as the context lasts, or until it dies, however that comes.

    Raises:
        ConfigError: another process has it.
    """
    with (folder / "lock").open("a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            file.seek(0)
            raise ConfigError(
                f"folder: {folder} is in use by another `specdec cluster serve` (process {file.read() or 'unknown'}); "
                "end that one, or give this fleet a `folder` and ports of its own"
            ) from None
        file.truncate(0)
        file.write(str(os.getpid()))
        file.flush()
        yield


def is_locked(folder: Path) -> bool:
    """Whether a process has it now."""
    try:
        with (folder / "lock").open() as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def bound_log(path: Path, limit: int = LOG_BYTES) -> None:
    """Where ``path`` is larger than ``limit`` bytes, move what it says to ``path.1`` and empty it. Whoever appends to
    it goes on; a line that comes meanwhile may be lost."""
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_size > limit:
            with contextlib.suppress(OSError):  # a full disk is no reason to let it grow
                shutil.copy(path, path.with_name(f"{path.name}.1"))
            os.truncate(path, 0)
