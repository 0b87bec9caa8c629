"""A real Vim that sends llama.vim's requests, with values that only Vim produces: ``reltime()`` as a text's time.

The plugin itself: ``pytest -m slow tests/editors/test_vim.py --llama-vim FOLDER``.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.fake_engine import BOOK
from tests.server.http.tabby.book_server import book_server
from tests.server.lsp.editor import without

VIM, SCRIPT = shutil.which("vim") or "", Path(__file__).with_name("infill.vim")
LINE = "total = add(total, value)"


@pytest.fixture
def llama_vim(request: pytest.FixtureRequest) -> Path:
    """A folder with the plugin, which no package registry has."""
    given = request.config.getoption("--llama-vim", None)
    if given is None:
        pytest.skip("needs --llama-vim FOLDER, a checkout of the plugin")
    return Path(given)


def can_run_jobs() -> bool:
    """Return whether Vim is installed, and was built with jobs and channels."""
    if not VIM:
        return False
    version = subprocess.run([VIM, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    return "+job" in version and "+channel" in version and "+reltime" in version


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run_jobs() or shutil.which("curl") is None, reason="needs Vim with jobs, and curl"),
]


def test_fill_in_the_middle_with_extra_context(tmp_path: Path) -> None:
    text, (line, character) = without(LINE)
    file, other, replies = tmp_path / "a.py", tmp_path / "colours.py", tmp_path / "replies"
    file.write_text(text, encoding="utf-8")
    other.write_text("colours = 3\n" * 5, encoding="utf-8")
    with book_server() as server:
        values = {
            "endpoint": f"{server.url}/infill", "lnum": line + 1, "col": character, "other": str(other),
            "replies": str(replies),
        }  # fmt: skip
        settings = [part for name, value in values.items() for part in ("--cmd", f"let g:{name} = {json.dumps(value)}")]
        subprocess.run(
            [VIM, "-N", "-u", "NONE", "-i", "NONE", "-n", "-T", "dumb", "--not-a-term", *settings, "-S", SCRIPT, file],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
    warmed, filled = replies.read_text(encoding="utf-8").splitlines()
    assert warmed == "{}"
    answer = json.loads(filled)
    assert answer["content"].startswith(LINE)
    assert answer["timings/predicted_n"] > 0
    assert file.read_text(encoding="utf-8") == BOOK


class Terminal:
    """A Vim in its own terminal."""

    def __init__(self, words: list[str], env: dict[str, str]) -> None:
        self._here, there = pty.openpty()
        self.process = subprocess.Popen(words, stdin=there, stdout=there, stderr=there, env=env, start_new_session=True)
        os.close(there)

    def press(self, keys: str) -> None:
        """Type ``keys`` and read the screen, so that Vim never blocks on output."""
        os.write(self._here, keys.encode())
        self.draw(0.3)

    def draw(self, seconds: float) -> None:
        """Read the screen for this long."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if select.select([self._here], [], [], left)[0]:
                try:
                    os.read(self._here, 1 << 16)
                except OSError:  # Vim has ended
                    return

    def until(self, ready: Callable[[], bool]) -> None:
        """Draw until it is so; raises AssertionError after a minute."""
        for _ in range(300):
            if ready():
                return
            self.draw(0.2)
        raise AssertionError("it never came")


def test_the_plugin_suggests_with_yanked_text_as_context(tmp_path: Path, llama_vim: Path) -> None:
    text, (line, _) = without(LINE)
    file, other, log = tmp_path / "a.py", tmp_path / "colours.py", tmp_path / "bodies"
    file.write_text(text, encoding="utf-8")
    other.write_text("".join(f"colour_{i} = {i}\n" for i in range(30)), encoding="utf-8")
    tee, vimrc = tmp_path / "bin" / "curl", tmp_path / "vimrc"
    tee.parent.mkdir()
    tee.write_text(
        f'#!/bin/sh\ntee -a {log}.sent | {shutil.which("curl")} "$@" | tee -a {log}.came\n', encoding="utf-8"
    )
    tee.chmod(0o755)
    env = os.environ | {"PATH": f"{tee.parent}:{os.environ['PATH']}", "TERM": "xterm", "HOME": str(tmp_path)}
    with book_server() as server:
        config = json.dumps({"endpoint_fim": f"{server.url}/infill", "show_info": 0, "ring_update_ms": 200})
        vimrc.write_text(
            f"set nocompatible nomore shortmess+=I hidden\nlet g:llama_config = {config}\nset rtp+={llama_vim}\n",
            encoding="utf-8",
        )
        vim = Terminal([VIM, "-u", str(vimrc), "-i", "NONE", "-n", str(other)], env)
        try:
            sent, came = Path(f"{log}.sent"), Path(f"{log}.came")
            vim.draw(1.0)
            vim.press("\r")  # a word of warning to Vim 9.0
            vim.press("ggVGy")
            vim.press(f":e! {file}\r")
            vim.until(lambda: sent.exists() and "colour_29" in sent.read_text(encoding="utf-8"))
            vim.draw(1.0)
            vim.press(f":{line + 1}\r")
            vim.press("A")
            vim.until(lambda: came.exists() and LINE in came.read_text(encoding="utf-8"))
            vim.draw(1.0)
            for keys in ("\t", "\x1b", ":wq\r"):
                vim.press(keys)
            vim.process.wait(20)
        finally:
            vim.process.kill()
    last = sent.read_text(encoding="utf-8").rpartition('"time":')[2]
    assert last.startswith("["), "a time is a list, once something was yanked"
    assert file.read_text(encoding="utf-8") == BOOK
