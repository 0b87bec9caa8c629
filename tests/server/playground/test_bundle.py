"""The page's sources: well typed, tested by their own tests, and built into the very files that are served."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from specdec.api.generate import ROOT
from specdec.control.inputs import DraftDecision
from tests.editors.node_program import copy_with_packages, npm

WEB, STATIC = ROOT / "server" / "playground" / "web", ROOT / "server" / "playground" / "static"

needs_npm = pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")


@pytest.fixture(scope="module")
def web(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The sources with their packages."""
    return copy_with_packages(WEB, tmp_path_factory.mktemp("playground") / "web")


def test_the_lock_names_no_registry() -> None:
    text = (WEB / "package-lock.json").read_text(encoding="utf-8")
    assert not re.findall(r'"resolved"|https?://', text)


def test_every_package_is_pinned() -> None:
    package = json.loads((WEB / "package.json").read_text(encoding="utf-8"))
    for version in (package["dependencies"] | package["devDependencies"]).values():
        assert re.fullmatch(r"\d+\.\d+\.\d+", version)


def test_bug_a_first_token_was_explained_as_a_step_of_prompts_only() -> None:
    """Every traced step samples a token: only decisions, and their absence, have an explanation."""
    source = (WEB / "src" / "trace_panel.tsx").read_text(encoding="utf-8")
    words = re.search(r"const WORDS.*?\{(.*?)\n\};", source, re.DOTALL)
    assert words is not None
    explained = set(re.findall(r'^  "?(.*?)"?: ', words[1], re.MULTILINE))
    assert explained == {"no draft", *filter(None, DraftDecision)}


@pytest.mark.node
@needs_npm
def test_the_served_files_match_the_build_of_the_sources(web: Path, tmp_path: Path) -> None:
    npm(web, "run", "build", "--", f"--outdir={tmp_path / 'static'}")
    built = {path.name: path.read_bytes() for path in (tmp_path / "static").iterdir()}
    assert built == {path.name: path.read_bytes() for path in STATIC.iterdir()}, "run `make playground`"


@pytest.mark.node
@needs_npm
def test_it_type_checks(web: Path) -> None:
    npm(web, "run", "check")


@pytest.mark.node
@needs_npm
def test_its_own_tests(web: Path) -> None:
    passed = re.search(r"^# pass (\d+)$", npm(web, "test"), re.MULTILINE)
    assert passed is not None
    assert int(passed[1]) >= 20
