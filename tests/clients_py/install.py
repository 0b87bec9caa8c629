"""Installs Python clients into an environment of their own: ``python -m tests.clients_py.install``; `make clients`.

They are many, and want older versions of each other than `tests.clients` tries, so each is locked with all it needs.
"""

from __future__ import annotations

import shutil
import subprocess
import venv
from pathlib import Path

from specdec.config import EngineConfig

LOCK = Path(__file__).with_name("requirements.txt")
HOME = EngineConfig().cache_dir.expanduser() / "clients-py"
PYTHON = HOME / "bin" / "python"
_INSTALLED = HOME / "requirements.txt"


def is_installed() -> bool:
    """Whether everything is there as it is locked."""
    return _INSTALLED.exists() and _INSTALLED.read_bytes() == LOCK.read_bytes()


def install() -> bool:
    """Whether anything was done."""
    if is_installed():
        return False
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME, with_pip=True)
    pip = [PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    subprocess.run([*pip, "-r", LOCK], check=True)
    shutil.copy(LOCK, _INSTALLED)
    return True


if __name__ == "__main__":
    print(f"Python clients: {'installed' if install() else 'were installed already'} in {HOME}")
