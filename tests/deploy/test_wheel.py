"""A package installed from a wheel works outside of the checkout, and its modules conflict with no other."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Sequence
from pathlib import Path

import pytest

from tools.markdown import REPOSITORY

pytestmark = pytest.mark.slow
SOURCES = ("bench", "cluster", "draft", "server", "specdec", "verify_kernels")
TINY = ("--target", "random:tiny", "--kernels", "reference", "--device", "cpu", "--threads", "1")
FOREIGN = "raise ImportError('this is not of specdec')\n"


class Installed:
    """An environment with the wheel and, by a path file, the packages it needs; a working folder that has modules of
    the names that ours have."""

    def __init__(self, folder: Path) -> None:
        self.work, home = folder / "work", folder / "env"
        venv.create(home, with_pip=False)
        self.bin = home / "bin"
        (self.site,) = home.glob("lib/python*/site-packages")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
        source = folder / "source"
        for name in SOURCES:
            shutil.copytree(
                REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__", "node_modules")
            )
        for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
            shutil.copy(REPOSITORY / name, source)
        subprocess.run([*pip, "wheel", "--no-deps", "--no-build-isolation", "-w", folder, source], check=True)
        (wheel,) = folder.glob("*.whl")
        python = str(self.bin / "python")
        subprocess.run([*pip, "--python", python, "install", "--no-deps", "--no-index", wheel], check=True)
        self.tops = {path.name for path in self.site.iterdir()}
        (self.site / "others.pth").write_text(sysconfig.get_paths()["purelib"] + "\n")
        self.work.mkdir()
        for name in ("server", "bench", "draft"):
            (self.site / f"{name}.py").write_text(FOREIGN)
            (self.work / f"{name}.py").write_text(FOREIGN)
        self.environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
        self.environment["PATH"] = f"{self.bin}{os.pathsep}{os.environ['PATH']}"

    def run(self, *words: str) -> str:
        """Standard output."""
        done = subprocess.run(words, cwd=self.work, env=self.environment, capture_output=True, text=True, timeout=200)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        return subprocess.Popen(words, cwd=self.work, env=self.environment, stdout=subprocess.PIPE, text=True)


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_only_specdec_is_at_the_top_level(installed: Installed) -> None:
    assert {name for name in installed.tops if not name.endswith((".dist-info", "__pycache__"))} == {"specdec"}
    parts = installed.site / "specdec" / "_parts"
    assert {path.name for path in parts.iterdir()} == {"bench", "cluster", "draft", "server", "verify_kernels"}
    for file in (
        "server/playground/static/page.js",
        "server/experiment/report/report.html.j2",
        "verify_kernels/cpu/csrc/vec.h",
    ):
        assert (parts / file).is_file()


def test_every_module_and_proto_file_is_included(installed: Installed) -> None:
    files = [
        file
        for folder in SOURCES
        for kind in ("*.py", "*.proto")
        for file in (REPOSITORY / folder).rglob(kind)
        if (file.parent / "__init__.py").exists()
    ]
    for file in files:
        place = file.relative_to(REPOSITORY)
        inside = place if place.parts[0] == "specdec" else Path("specdec/_parts") / place
        assert (installed.site / inside).is_file(), inside


def test_commands_work_outside_of_the_checkout(installed: Installed) -> None:
    assert "generate" in installed.run("specdec", "--help")
    assert "it fits" in installed.run("specdec", "doctor", *TINY)
    here = json.loads(installed.run("specdec", "generate", "hello", "--max-tokens", "4", "--json", *TINY))
    with installed.start(
        ["specdec", "serve", "--grpc-port", "0", "--http-port", "0", "--kv-disk-bytes", "0", "--quiet", *TINY]
    ) as process:
        assert process.stdout is not None
        try:
            lines = [process.stdout.readline() for _ in range(5)]
            (address,) = re.findall(r"gRPC +(\S+)", "".join(lines))
            words = ("generate", "hello", "--max-tokens", "4", "--json", "--server", address)
            there = json.loads(installed.run("specdec", *words))
        finally:
            process.send_signal(signal.SIGTERM)
        assert process.wait(timeout=60) == 0
    assert there["token_ids"] == here["token_ids"]


def test_a_users_modules_of_these_names_keep_working(installed: Installed) -> None:
    (installed.work / "server.py").write_text("MINE = True\n")
    output = installed.run("python", "-c", "import specdec.client, server, verify_kernels; print(server.MINE)")
    assert output == "True\n"
