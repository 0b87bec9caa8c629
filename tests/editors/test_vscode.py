"""The VS Code extension: types, bundle, its own tests, and its provider on a real `specdec lsp`."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from pathlib import Path

import pytest

from server.lsp.documents import Settings
from specdec.api.generate import ROOT
from tests.editors.node_program import copy_with_packages, npm
from tests.server.lsp.editor import LSP, running, without

SOURCE = ROOT / "server" / "editors" / "vscode"
LINE = "total = add(total, value)"


def test_every_setting_has_a_reader_and_its_default() -> None:
    declared = json.loads((SOURCE / "package.json").read_text(encoding="utf-8"))["contributes"]["configuration"]
    defaults = {name.removeprefix("specdec."): each["default"] for name, each in declared["properties"].items()}
    starting = {"command", "server", "tls", "keyFile", "ca", "cert", "certKey"}
    assert starting < {*defaults}
    options = {name: value for name, value in defaults.items() if name not in starting}
    assert options == Settings().model_dump(mode="json", by_alias=True)


needs_npm = [pytest.mark.node, pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm")]


def test_the_lock_names_no_registry() -> None:
    text = (SOURCE / "package-lock.json").read_text(encoding="utf-8")
    assert not re.findall(r'"resolved"|https?://', text)


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked files of the extension, with its packages."""
    return copy_with_packages(SOURCE, tmp_path_factory.mktemp("vscode") / "extension")


class TestExtension:
    pytestmark = needs_npm

    def test_it_type_checks_and_can_be_bundled(self, extension: Path) -> None:
        npm(extension, "run", "check")
        npm(extension, "run", "build")
        bundle = (extension / "dist" / "extension.js").read_text(encoding="utf-8")
        assert set(re.findall(r'require\("([^".]+)"\)', bundle)) - {"vscode"} <= {
            "assert", "child_process", "crypto", "events", "fs", "net", "os", "path", "readline", "url", "util",
        }  # fmt: skip

    def test_its_own_tests(self, extension: Path) -> None:
        passed = re.search(r"^# pass (\d+)$", npm(extension, "test"), re.MULTILINE)
        assert passed is not None
        assert int(passed[1]) >= 10

    async def test_on_a_real_language_server(self, extension: Path, tmp_path: Path) -> None:
        npm(extension, "run", "build-tests")
        text, (line, character) = without(LINE)
        (tmp_path / "a.py").write_text(text, encoding="utf-8")
        async with running() as server:
            process = await asyncio.create_subprocess_exec(
                "node", str(extension / "build" / "integration.js"), str(tmp_path / "a.py"), str(line), str(character),
                *LSP, "--server", server.address, stdout=asyncio.subprocess.PIPE, cwd=ROOT,
            )  # fmt: skip
            out, _ = await asyncio.wait_for(process.communicate(), 60)
            assert process.returncode == 0
            outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
        found = json.loads(out)
        assert found["texts"] == [[LINE], [LINE[3:]]]
        assert ({*found["states"]}, found["states"][-1], found["code"]) == ({"ready", "busy"}, "ready", 0)
        capabilities = found["capabilities"]
        assert (capabilities["inlineCompletionProvider"], capabilities["positionEncoding"]) == ({}, "utf-16")
        assert capabilities["textDocumentSync"]["change"] == 2
        assert outcomes["accepted"] == 1
