"""Installs clients of others into an environment of their own: ``python -m tests.clients.install``; `make clients`."""

from __future__ import annotations

import shutil
import subprocess
import venv

from specdec.config import EngineConfig

PACKAGES = ("anthropic==2.12.0", "langchain-openai==1.7.3", "mistralai==3.7.0", "openai==3.54.0")
HOME = EngineConfig().cache_dir.expanduser() / "clients"
PYTHON = HOME / "bin" / "python"
_LIST = HOME / "installed.txt"


def is_installed() -> bool:
    """Whether every client is there, in the versions wanted."""
    return _LIST.exists() and _LIST.read_text(encoding="utf-8").split() == [*PACKAGES]


def install() -> bool:
    """Whether anything was done."""
    if is_installed():
        return False
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME, with_pip=True)
    subprocess.run([PYTHON, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", *PACKAGES], check=True)
    _LIST.write_text("\n".join(PACKAGES), encoding="utf-8")
    return True


if __name__ == "__main__":
    done = install()
    print(f"{', '.join(PACKAGES)}: {'installed' if done else 'were installed already'} in {HOME}")
