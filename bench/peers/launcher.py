"""Becomes the command it is given, and dies with who asked for it: ``python launcher.py PARENT_PID COMMAND...``.

Imports nothing of ours: it also runs with a peer's own Python.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def main(words: list[str]) -> None:
    """Does not return."""
    parent, *command = words
    # A benchmark that is killed could not wake the peers it has stopped: they would keep their memory for ever.
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != int(parent):
        sys.exit("the benchmark ended before its peer began")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: {command[0]}: {error.strerror}")


if __name__ == "__main__":
    main(sys.argv[1:])
