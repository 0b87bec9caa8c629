"""Child processes: those that run a module of ours in this Python, and those that end when this process ends."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def module_command(module: str) -> list[str]:
    """The words that run ``module``; to be started with `module_environment`. Modules of the working folder are not
    imported in place of the package's."""
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """This process's, in which modules are found where this process finds them, from wherever it was started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}


def die_with_parent() -> None:
    """In a child: the kernel kills it when its parent dies."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


_PR_SET_PDEATHSIG = 1


# $0 is the scratch folder, the arguments are a command. The subshell waits for a line from the process that started it.
# If that process ends without one, by whatever signal, the subshell ends the command's processes and removes the
# folder.
_WATCHED = """
exec 3<&0
(read -r line <&3 && exit; trap '' TERM; kill -TERM 0; rm -rf -- "$0") > /dev/null 2>&1 &
exec 3<&-
exec "$@" < /dev/null
"""


@contextmanager
def watched(command: Sequence[str], scratch: str, **options: Any) -> Iterator[subprocess.Popen[str]]:
    """Start ``command``, and wait for it at the end of the block.

    If this process ends meanwhile, or the block raises, the command and its children end too, and the folder
    ``scratch`` is removed. options: of `subprocess.Popen`.
    """
    held, alive = os.pipe()
    try:
        words = ["sh", "-c", _WATCHED, scratch, *command]
        with subprocess.Popen(words, stdin=held, start_new_session=True, **options) as process:
            try:
                yield process
            except BaseException:
                process.kill()
                raise
        os.write(alive, b"\n")
    finally:
        os.close(held)
        os.close(alive)
