"""Replaces a file atomically."""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO


@contextmanager
def replacing(path: Path, mode: int = 0o600) -> Iterator[BinaryIO]:
    """A file that takes the place of the one at ``path``, with its owner and mode, once the block has written it. If
    the block raises, nothing changes. mode: of a new one, less the umask; by default its owner's only.

    Raises:
        OSError: the file cannot be written.
    """
    path = Path(os.path.realpath(path))  # a link stays, and the file that it names changes
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    try:
        with os.fdopen(handle, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if path.exists():
            former = path.stat()
            with suppress(PermissionError):  # only root may give a file to another owner
                os.chown(temporary, former.st_uid, former.st_gid)
            os.chmod(temporary, former.st_mode & 0o777)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise
