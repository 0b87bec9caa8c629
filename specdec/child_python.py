"""Processes of this Python that run a module of ours."""

from __future__ import annotations

import os
import sys


def module_command(module: str) -> list[str]:
    """The words that run ``module``; to be started with `module_environment`. Not from the working folder: what lies
    there is somebody else's."""
    return [sys.executable, "-P", "-m", module]


def module_environment() -> dict[str, str]:
    """This process's, in which modules are found where this process finds them, from wherever it was started."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
