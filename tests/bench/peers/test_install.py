"""`make peers` installs each engine once, in its own environment. The tests download nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.peers.install import RECIPES, Environment, Recipe, install, main
from bench.peers.peer import PeerError

RECIPE = Recipe("some", "two==1", ("--no-deps",), {"JOBS": "2"}, ("three",), ("alias", "two", "+cpu"), "import two")


class Pip:
    """Writes what pip would install, or fails at a step."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self._site, self._fails = folder / "some" / "lib" / "python3" / "site-packages", fails
        self.ran: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, words: Sequence[str], env: dict[str, str]) -> int:
        self.ran.append((list(words), env))
        info = self._site / "two-2.5.dist-info"
        info.mkdir(parents=True, exist_ok=True)
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two\nVersion: 2.5\n")
        return int(bool(self._fails) and self._fails in words)


def test_it_is_installed_once_into_its_own_place(tmp_path: Path) -> None:
    pip = Pip(tmp_path)
    assert install(RECIPE, tmp_path, pip)
    venv, (words, env), three, finish = pip.ran
    home = tmp_path / "some"
    assert venv[0] == [sys.executable, "-m", "venv", str(home)]
    assert words[0] == str(home / "bin" / "python")
    assert words[-2:] == ["--no-deps", "two==1"]
    assert env == {"JOBS": "2"}
    assert three[0][-3:] == ["uninstall", "--yes", "three"]
    assert finish[0] == [str(home / "bin" / "python"), "-c", "import two"]
    found = Environment(tmp_path, "some")
    assert found.versions("two", "alias", "three") == "two 2.5, alias 2.5+cpu"
    found.require()
    assert not install(RECIPE, tmp_path, pip)
    assert len(pip.ran) == 4
    assert install(RECIPE, tmp_path, pip, again=True)
    assert install(Recipe("some", "two==2"), tmp_path, pip)


@pytest.mark.parametrize("fails", ["venv", "two==1", "three", "import two"])
def test_what_was_not_finished_is_not_there(tmp_path: Path, fails: str) -> None:
    with pytest.raises(PeerError, match="could not be installed"):
        install(RECIPE, tmp_path, Pip(tmp_path, fails))
    with pytest.raises(PeerError, match="make peers"):
        Environment(tmp_path, "some").require()
    assert install(RECIPE, tmp_path, Pip(tmp_path))


def test_a_missing_program_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="make peers"):
        Environment(tmp_path, "some").find("bin/server")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--cache-dir", str(tmp_path), "nobody"])
    assert not (tmp_path / "peers").exists()


def test_every_requirement_has_a_version() -> None:
    """Versions are pinned, so that a table can be reproduced."""
    assert all("==" in recipe.package for recipe in RECIPES.values())
