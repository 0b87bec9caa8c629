"""Fetches packages of Node.js once, as a lock file pins them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

from specdec.config import EngineConfig


def fetched(folder: Path, *programs: str) -> Path:
    """A folder with the packages that the lock file in ``folder`` pins, and its ``programs``, which ECMAScript modules
    need next to them. The cache keeps it until one of these files changes."""
    names = ("package.json", "package-lock.json", *programs)
    content = b"\n".join((folder / name).read_bytes() for name in names)
    cache = EngineConfig().cache_dir.expanduser() / "test-node"
    found = cache / hashlib.sha256(content).hexdigest()[:16]
    if found.exists():
        return found
    cache.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=cache))
    for name in names:
        shutil.copy(folder / name, fresh)
    done = subprocess.run(
        ["npm", "ci", "--no-audit", "--no-fund", "--ignore-scripts"],
        cwd=fresh, capture_output=True, text=True, check=False, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    try:
        os.replace(fresh, found)
    except OSError:  # another run was quicker
        shutil.rmtree(fresh)
    return found
