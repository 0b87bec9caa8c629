"""Prometheus and its promtool, from Debian's package: `make promtool`."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from specdec.config import EngineConfig

HOME = EngineConfig().cache_dir.expanduser() / "prometheus"


def program(name: str) -> Path | None:
    """`prometheus` or `promtool`, unpacked here or installed on this machine; None: neither."""
    ours = HOME / "usr" / "bin" / name
    found = str(ours) if ours.exists() else shutil.which(name)
    return None if found is None else Path(found)


def install() -> bool:
    """Whether anything was done: the package is unpacked, not installed, so it needs no root and starts no service."""
    if HOME.exists():
        return False
    HOME.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=HOME.parent))
    subprocess.run(["apt-get", "download", "prometheus"], cwd=fresh, check=True)
    (package,) = fresh.glob("*.deb")
    subprocess.run(["dpkg-deb", "--extract", package, fresh], check=True)
    package.unlink()
    os.replace(fresh, HOME)
    return True


if __name__ == "__main__":
    print(f"Prometheus: {'unpacked' if install() else 'was unpacked already'} in {HOME}")
