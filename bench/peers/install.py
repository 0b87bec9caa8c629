"""Installs the peers, each into an environment of its own: ``python -m bench.peers.install``; `make peers`."""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from bench.peers.environment import Environment
from bench.peers.peer_error import PeerError
from bench.peers.recipe import RECIPES, Recipe
from specdec.config import EngineConfig

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
