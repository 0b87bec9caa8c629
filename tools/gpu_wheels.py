"""Downloads the wheels that a machine with a GPU lacks, for `make gpu` there: ``python -m tools.gpu_wheels``."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tools.code_map import REPOSITORY

# What an image with torch, triton and pytest does not hold of what `make gpu` imports; typing-extensions it holds, in
# a version that may be too old for pydantic.
PACKAGES = (
    "annotated-types", "gguf", "llguidance", "pydantic", "pydantic-core", "typing-extensions", "typing-inspection",
)  # fmt: skip
PYTHON = "3.12"
# pip takes each for exactly that one, not for those below it.
GLIBCS = ("1", "2010", "2014", "_2_17", "_2_24", "_2_27", "_2_28", "_2_31", "_2_34", "_2_35")
MOST_BYTES = 64 << 20  # that may travel to the machine, with the sources


def main() -> int:
    """Fill the folder .whl, saying what it weighs. Returns pip's exit code, 1 where it weighs too much."""
    folder = REPOSITORY / ".whl"
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.whl"):
        if normal(old.name.split("-")[0]) in PACKAGES:
            old.unlink()  # pip installs no two versions of one package
    code = subprocess.run(command(folder), check=False).returncode
    wheels = sorted(folder.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / (1 << 20):.1f} MiB in {folder}")
    return code or int(size > MOST_BYTES)


def command(folder: Path) -> list[str]:
    """pip's, for wheels of the versions that requirements.lock pins, whatever machine it runs on."""
    platforms = [word for glibc in GLIBCS for word in ("--platform", f"manylinux{glibc}_x86_64")]
    return [
        sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--no-deps", "--only-binary=:all:",
        "--python-version", PYTHON, "--implementation", "cp", *platforms, "-d", str(folder),
        *pinned((REPOSITORY / "requirements.lock").read_text(encoding="utf-8")),
    ]  # fmt: skip


def pinned(lock: str) -> list[str]:
    """NAME==VERSION of each of `PACKAGES`.

    Raises:
        KeyError: the lock file does not name one of them.
    """
    versions = {normal(name): version for name, version in re.findall(r"^([\w.-]+)==(\S+)", lock, re.MULTILINE)}
    return [f"{name}=={versions[name]}" for name in PACKAGES]


def normal(name: str) -> str:
    """A package's name as the package index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


if __name__ == "__main__":
    sys.exit(main())
