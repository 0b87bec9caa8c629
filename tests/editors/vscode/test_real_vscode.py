"""The extension as a whole, in a real VS Code in headless Chromium: `make vscode` installs one."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from specdec.api.generate import ROOT
from tests.editors.node_program import copy_with_packages, npm, packages
from tests.editors.test_vscode import LINE, SOURCE
from tests.editors.vscode.install import PROGRAM
from tests.fake_engine import BOOK
from tests.server.lsp.editor import position, running, without
from tests.server.playground.test_browser import CHROMIUM
from tests.server.playground.test_bundle import WEB

HERE = Path(__file__).parent
TEXT, (LINE_NUMBER, CHARACTER) = without(LINE)
SETTINGS = {
    "specdec.command": [sys.executable, "-m", "specdec.cli.main"], "specdec.debounceMs": 0, "specdec.nextEdits": False,
    "editor.quickSuggestions": {"other": "off"}, "workbench.startupEditor": "none", "telemetry.telemetryLevel": "off",
    "extensions.autoCheckUpdates": False, "extensions.autoUpdate": False,
}  # fmt: skip

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium"),
    pytest.mark.skipif(not PROGRAM.exists(), reason="needs a VS Code: make vscode"),
]


@pytest.fixture(scope="module")
def extensions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of extensions with ours in it, as an installed one is."""
    built = copy_with_packages(SOURCE, tmp_path_factory.mktemp("vscode") / "extension")
    npm(built, "run", "build")
    folder = tmp_path_factory.mktemp("extensions")
    ours = folder / "specdec.specdec-0.2.0"
    (ours / "dist").mkdir(parents=True)
    shutil.copy(built / "package.json", ours)
    shutil.copy(built / "dist" / "extension.js", ours / "dist")
    return folder


def labels(state: str) -> str:
    """Return the status bar's label for screen readers, and its tooltip."""
    return f"specdec: {state}. Click to switch suggestions on or off."


class Code:
    """A VS Code of one user, with one document; records what the user sees."""

    def __init__(self, home: Path, url: str) -> None:
        self.home, self.url = home, url
        self.document = home / "project" / "a.py"

    async def use(
        self, scenario: str, place: tuple[int, int] = (LINE_NUMBER, CHARACTER)
    ) -> AsyncIterator[dict[str, Any]]:
        """Return the observations of a scenario of use.mjs at a line and column, counted from 0."""
        shot, url = self.home / f"{scenario}.png", f"{self.url}/?folder={self.document.parent}"
        process = await asyncio.create_subprocess_exec(
            "node", str(HERE / "use.mjs"), str(packages(WEB)), str(CHROMIUM), url, scenario,
            str(self.document), f"{place[0] + 1}:{place[1] + 1}", str(shot),
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        assert process.stdout is not None
        assert process.stderr is not None
        try:
            async with asyncio.timeout(150):
                while line := await process.stdout.readline():
                    yield json.loads(line)
                faults = (await process.stderr.read()).decode()
                assert await process.wait() == 0, f"{faults}\nscreenshot: {shot}"
        finally:
            if process.returncode is None:
                process.terminate()


@asynccontextmanager
async def code(
    home: Path, extensions: Path, server: str, settings: dict[str, Any] | None = None
) -> AsyncIterator[Code]:
    """VS Code with specdec's extension, whose setting is the gRPC address ``server``."""
    document, config = home / "project" / "a.py", home / "user" / "User" / "settings.json"
    for file, text in (
        (document, TEXT), (config, json.dumps({**SETTINGS, "specdec.server": server, **(settings or {})})),
    ):  # fmt: skip
        file.parent.mkdir(parents=True)
        file.write_text(text, encoding="utf-8")
    process = await asyncio.create_subprocess_exec(
        str(PROGRAM), "--auth", "none", "--bind-addr", "127.0.0.1:0", "--user-data-dir", str(home / "user"),
        "--extensions-dir", str(extensions), "--config", str(home / "config.yaml"), "--disable-telemetry",
        "--disable-update-check", "--disable-workspace-trust",
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        async with asyncio.timeout(60):
            log = ""
            while not (found := re.search(r"listening on (http://\S+?)/?\s", log)):
                line = (await process.stdout.readline()).decode()
                assert line, log
                log += line
        drain = asyncio.create_task(process.stdout.read())
        yield Code(home, found[1])
    finally:
        process.terminate()
        await process.wait()
    await drain


async def test_a_suggestion_is_shown_shrinks_while_typing_and_is_accepted(extensions: Path, tmp_path: Path) -> None:
    async with running() as server, code(tmp_path, extensions, server.address) as editor:
        seen = [look async for look in editor.use("take")]
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
    assert seen == [{"status": labels("book"), "whole": LINE[1:], "rest": LINE[3:]}]
    assert editor.document.read_text(encoding="utf-8") == BOOK
    assert (outcomes["accepted"], outcomes["rejected"]) == (1, 0)
    assert outcomes["shown"] >= 1


async def test_bug_a_cell_of_a_notebook_gets_suggestions(extensions: Path, tmp_path: Path) -> None:
    source = TEXT[: TEXT.index("    return total / len")].removesuffix("\n")
    cells = [{"cell_type": "code", "metadata": {}, "execution_count": None, "outputs": [], "source": source}]
    notebook = {"cells": cells, "metadata": {"language_info": {"name": "python"}}, "nbformat": 4, "nbformat_minor": 5}
    async with running() as server, code(tmp_path, extensions, server.address) as editor:
        editor.document = editor.document.with_name("a.ipynb")
        editor.document.write_text(json.dumps(notebook), encoding="utf-8")
        seen = [look async for look in editor.use("cell")]
    assert seen == [{"whole": LINE[1:]}]


async def test_a_word_is_accepted_and_the_rest_is_not(extensions: Path, tmp_path: Path) -> None:
    async with running() as server, code(tmp_path, extensions, server.address) as editor:
        seen = [look async for look in editor.use("takeWord")]
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
    assert seen == [{"whole": LINE[1:], "left": LINE[len("total") :]}]
    assert (outcomes["partially_accepted"], outcomes["accepted"]) == (0, 0)  # VS Code does not say so
    assert editor.document.read_text(encoding="utf-8").splitlines()[LINE_NUMBER].strip() == "total"


EDITS = {"specdec.nextEdits": True, "specdec.editModel": "book"}
NO_GHOSTS = {"editor.inlineSuggest.enabled": False}


async def test_predicted_edits_are_shown_dismissed_jumped_to_and_taken(extensions: Path, tmp_path: Path) -> None:
    place = position(TEXT, TEXT.index("values):"))
    async with running() as server, code(tmp_path, extensions, server.address, EDITS | NO_GHOSTS) as editor:
        [seen] = [look async for look in editor.use("predict", place)]
    assert seen == {"first": "number", "seen": [["number", line] for line in ("9", "12", "14")]}
    assert editor.document.read_text(encoding="utf-8") == TEXT.replace("values", "numbers").replace(
        "numbers)", "numbers_)", 1
    )


async def test_a_predicted_insertion_at_the_cursor_is_ghost_text(extensions: Path, tmp_path: Path) -> None:
    place = position(TEXT, TEXT.index("\n\n\ndef mean") + 1)
    async with running() as server, code(tmp_path, extensions, server.address, EDITS) as editor:
        seen = [look async for look in editor.use("insertion", place)]
    assert seen == [{"whole": "0 + 0", "left": " + 0"}]
    assert "\nsum = 0 + 0\n" in editor.document.read_text(encoding="utf-8")


async def test_the_status_bar_switches_suggestions_off_and_on(extensions: Path, tmp_path: Path) -> None:
    async with running() as server, code(tmp_path, extensions, server.address) as editor:
        seen = [look async for look in editor.use("toggle")]
    assert seen == [{"off": labels("off"), "silent": 0, "on": labels("book"), "whole": LINE[2:]}]


async def test_an_unreachable_server_is_reported_and_found_when_it_starts(
    extensions: Path, tmp_path: Path, unused_tcp_port: int
) -> None:
    async with code(tmp_path, extensions, f"127.0.0.1:{unused_tcp_port}") as editor:
        looks = editor.use("away")
        first = await anext(looks)
        async with running(port=unused_tcp_port):
            second = [look async for look in looks]
    assert f"no specdec server answers at 127.0.0.1:{unused_tcp_port}; start one" in first["status"]
    assert second == [{"status": labels("book"), "whole": LINE[1:]}]
