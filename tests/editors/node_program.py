"""Node programs of this repository, with their packages, built in a folder of their own."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from specdec.config import EngineConfig


def npm(folder: Path, *args: str, timeout: float = 240) -> str:
    """Run npm in ``folder`` and return its output. Fails the test if npm fails."""
    done = subprocess.run(["npm", *args], cwd=folder, capture_output=True, text=True, check=False, timeout=timeout)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def packages(source: Path) -> Path:
    """A folder with the packages that ``source`` is locked to; they are fetched once per lock file."""
    lock = (source / "package-lock.json").read_bytes()
    cache = EngineConfig().cache_dir.expanduser() / "test-node"
    folder = cache / hashlib.sha256(lock).hexdigest()[:16]
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(dir=cache))
        for name in ("package.json", "package-lock.json"):
            shutil.copy(source / name, fresh)
        npm(fresh, "ci", "--no-audit", "--no-fund", "--ignore-scripts")
        try:
            os.replace(fresh, folder)
        except OSError:  # another run was quicker
            shutil.rmtree(fresh)
    return folder


def copy_with_packages(source: Path, target: Path) -> Path:
    """Copy the tracked files of ``source`` to ``target``, with its packages."""
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("node_modules", "dist", "build"))
    (target / "node_modules").symlink_to(packages(source) / "node_modules")
    return target
