"""Installs Python clients into environments of their own: ``python -m tests.third_party_clients.environments``.

`make clients` runs it. There are two, because some clients want older versions of each other than tool calls need:

- ``tools``: the newest clients of the APIs that call tools;
- ``python``: many clients and frameworks, locked with everything they need.
"""

from __future__ import annotations

import shutil
import subprocess
import venv
from dataclasses import dataclass
from pathlib import Path

from specdec.config import EngineConfig

HERE = Path(__file__).parent


@dataclass(frozen=True)
class Environment:
    """A virtual environment in the cache folder with the packages of ``requirements``."""

    name: str
    requirements: Path
    with_dependencies: bool  # false if the requirements list every dependency

    @property
    def folder(self) -> Path:
        return EngineConfig().cache_dir.expanduser() / f"clients-{self.name}"

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def _installed(self) -> Path:
        """A copy of the requirements, written once all are installed."""
        return self.folder / "requirements.txt"

    def is_installed(self) -> bool:
        """Whether the environment has every requirement in its present version."""
        return self._installed.exists() and self._installed.read_bytes() == self.requirements.read_bytes()

    def install(self) -> None:
        """Create the environment from scratch.

        Raises: subprocess.CalledProcessError: if pip fails.
        """
        shutil.rmtree(self.folder, ignore_errors=True)
        venv.create(self.folder, with_pip=True)
        pip = [self.python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        options = [] if self.with_dependencies else ["--no-deps"]
        subprocess.run([*pip, *options, "-r", self.requirements], check=True)
        shutil.copy(self.requirements, self._installed)


TOOLS = Environment("tools", HERE / "tools" / "requirements.txt", with_dependencies=True)
PYTHON = Environment("python", HERE / "python" / "requirements.txt", with_dependencies=False)

if __name__ == "__main__":
    for environment in (TOOLS, PYTHON):
        if not environment.is_installed():
            environment.install()
        print(f"clients of tests/third_party_clients/{environment.name}: installed in {environment.folder}")
