"""The virtual environment that a peer is installed in, away from our own."""

from __future__ import annotations

import importlib.metadata
from pathlib import Path

from bench.peers.peer_error import PeerError

_STAMP = "installed"


class Environment:
    """The one of ``engine`` below ``folder``; there once `make peers` has finished it."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.engine, self.path = engine, folder / engine

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.path / "bin" / "python"

    @property
    def stamp(self) -> Path:
        """Holds what was installed, once all of it is."""
        return self.path / _STAMP

    def require(self) -> None:
        """Raises PeerError unless it is installed."""
        if not self.stamp.exists():
            raise PeerError("not installed; `make peers` does it")

    def site_packages(self) -> Path:
        """Where its distributions lie; raises PeerError."""
        return self._only("lib/python*/site-packages")

    def find(self, pattern: str) -> Path:
        """A file among its distributions; raises PeerError."""
        return self._only(f"lib/python*/site-packages/{pattern}")

    def program(self, name: str) -> Path:
        """A command of it; raises PeerError."""
        return self._only(f"bin/{name}")

    def versions(self, *names: str) -> dict[str, str]:
        """Of installed distributions, those that are there."""
        folders = [str(folder) for folder in self.path.glob("lib/python*/site-packages")]
        return {
            name: dist.version for name in names for dist in importlib.metadata.distributions(name=name, path=folders)
        }

    def _only(self, pattern: str) -> Path:
        found = next(iter(sorted(self.path.glob(pattern))), None)
        if found is None:
            raise PeerError(f"no {pattern} in {self.path}; `make peers ARGS=--again` installs it anew")
        return found
