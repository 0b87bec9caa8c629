"""Installs a real VS Code that a browser can use: ``python -m tests.editors.vscode.install``; `make vscode`.

It is the npm package code-server: VS Code's own sources, built. Its installer wants a package from GitHub that npm has
as well, and ripgrep, which only searching in files needs; so its parts are installed one by one here.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path

from specdec.config import EngineConfig
from tests.editors.node_program import npm

VERSION = "4.96.4"  # VS Code 1.96.4; later ones want a later Node than 20
NATIVE = ("@parcel/watcher", "@vscode/spdlog", "node-pty", "native-watchdog", "@vscode/deviceid")
HOME = EngineConfig().cache_dir.expanduser() / "vscode" / VERSION
PROGRAM = HOME / "node_modules" / ".bin" / "code-server"


def install() -> bool:
    """Whether anything was done; takes a minute or two, a C++ compiler and some 330 MB."""
    if PROGRAM.exists():
        return False
    HOME.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=HOME.parent))
    npm(fresh, "install", "--no-audit", "--no-fund", "--ignore-scripts", f"code-server@{VERSION}")
    code = fresh / "node_modules" / "code-server" / "lib" / "vscode"
    _from_npm_alone(code / "npm-shrinkwrap.json")
    npm(code, "install", "--omit=dev", "--no-audit", "--no-fund", "--ignore-scripts")
    npm(code, "rebuild", *NATIVE)
    (code / "node_modules.asar").symlink_to(
        "node_modules"
    )  # the folder in which extensions find VS Code's own packages
    npm(fresh, "rebuild", "argon2", "--build-from-source")
    shutil.rmtree(HOME, ignore_errors=True)
    os.replace(fresh, HOME)
    return True


def _from_npm_alone(lock: Path) -> None:
    """Replace packages locked to a commit elsewhere by npm's of the same version."""
    text = json.loads(lock.read_text(encoding="utf-8"))
    for entry in text["packages"].values():
        if str(entry.get("resolved", "")).startswith("git+"):
            del entry["resolved"]
            entry.pop("integrity", None)
    lock.write_text(json.dumps(text), encoding="utf-8")


if __name__ == "__main__":
    done = install()
    print(f"VS Code {VERSION} (code-server): {'installed' if done else 'was installed already'} in {HOME}")
