"""A real Vim that asks for what llama.vim asks for, with what only a Vim makes: ``reltime()`` as a text's time."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.server.completion.book_engine import BOOK
from tests.server.http.tabby.book_server import book_server
from tests.server.lsp.editor import without

VIM, SCRIPT = shutil.which("vim") or "", Path(__file__).with_name("infill.vim")
LINE = "total = add(total, value)"


def can_run_jobs() -> bool:
    """Whether Vim is there, and was built with jobs and channels."""
    if not VIM:
        return False
    told = subprocess.run([VIM, "--version"], capture_output=True, text=True, check=False, timeout=20).stdout
    return "+job" in told and "+channel" in told and "+reltime" in told


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not can_run_jobs() or shutil.which("curl") is None, reason="needs Vim with jobs, and curl"),
]


def test_a_gap_is_filled_with_other_texts_beside_it(tmp_path: Path) -> None:
    text, (line, character) = without(LINE)
    file, other, replies = tmp_path / "a.py", tmp_path / "colours.py", tmp_path / "replies"
    file.write_text(text, encoding="utf-8")
    other.write_text("colours = 3\n" * 5, encoding="utf-8")
    with book_server() as server:
        values = {
            "endpoint": f"{server.url}/infill", "lnum": line + 1, "col": character, "other": str(other),
            "replies": str(replies),
        }  # fmt: skip
        told = [part for name, value in values.items() for part in ("--cmd", f"let g:{name} = {json.dumps(value)}")]
        subprocess.run(
            [VIM, "-N", "-u", "NONE", "-i", "NONE", "-n", "-T", "dumb", "--not-a-term", *told, "-S", SCRIPT, file],
            stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60,
        )  # fmt: skip
    warmed, filled = replies.read_text(encoding="utf-8").splitlines()
    assert warmed == "{}"
    answer = json.loads(filled)
    assert answer["content"].startswith(LINE)
    assert answer["timings/predicted_n"] > 0
    assert file.read_text(encoding="utf-8") == BOOK
