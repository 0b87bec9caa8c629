"""The Neovim recipe in a real Neovim."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.completion.service import Acceptance
from specdec.api.generate import ROOT
from tests.editors.neovim import neovim
from tests.fake_engine import BOOK
from tests.server.lsp.editor import LSP, running, without

RECIPE = ROOT / "server" / "editors" / "nvim" / "specdec.lua"
LINE = "total = add(total, value)"
TEXT = "return table.concat(vim.api.nvim_buf_get_lines(0, 0, -1, false), '\\n')"
# The extmarks of the buffer with virtual text.
GHOST = """
local found = {}
for _, mark in ipairs(vim.api.nvim_buf_get_extmarks(0, -1, 0, -1, { details = true })) do
  local text = {}
  for _, chunk in ipairs(mark[4].virt_text or {}) do text[#text + 1] = chunk[1] end
  for _, line in ipairs(mark[4].virt_lines or {}) do text[#text + 1] = '\\n' .. (line[1] and line[1][1] or '') end
  if #text > 0 then found[#found + 1] = table.concat(text) end
end
return table.concat(found, '|')
"""


def version(program: str) -> tuple[int, int]:
    """Major and minor."""
    version_text = subprocess.run(
        [program, "--version"], capture_output=True, text=True, check=False, timeout=20
    ).stdout
    found = re.search(r"NVIM v(\d+)\.(\d+)", version_text)
    return (int(found[1]), int(found[2])) if found else (0, 0)


NVIM = shutil.which("nvim") or ""

pytestmark = pytest.mark.skipif(not NVIM or version(NVIM) < (0, 10), reason="needs Neovim 0.10 or later")


async def counted(outcomes: Acceptance, name: str) -> bool:
    """Return whether one outcome of a kind is eventually counted."""
    for _ in range(200):
        if getattr(outcomes, name) == 1:
            return True
        await asyncio.sleep(0.02)
    return False


async def test_typing_and_accepting(tmp_path: Path) -> None:
    text, (line, character) = without(LINE)
    file = tmp_path / "a.py"
    file.write_text(text, encoding="utf-8")
    async with running() as server:
        outcomes = server.serving.models.first.completion.outcomes.total
        options = {"cmd": LSP, "server": server.address, "settings": {"debounceMs": 0}}
        async with neovim(NVIM, RECIPE, options, [file]) as nvim:
            await nvim.until("return specdec.status and specdec.status.state", "ready")
            await nvim.call("nvim_win_set_cursor", 0, [line + 1, character])
            await nvim.type("A")
            await nvim.until(GHOST, LINE)
            await nvim.type("tot")
            await nvim.until(GHOST, LINE[3:])
            await nvim.type("<M-Right>")
            begun = BOOK.replace(LINE, "total")
            await nvim.until(TEXT, begun.rstrip("\n"))
            await nvim.until(GHOST, LINE[5:])
            assert await counted(outcomes, "partially_accepted")
            await nvim.type("<Tab>")
            await nvim.until(TEXT, BOOK.rstrip("\n"))
            await nvim.until(GHOST, "")
            assert await counted(outcomes, "accepted")
            assert outcomes.rejected == 0


ONE, REST = "total = 0", "\n    for value in values:"
TWO = ONE + REST


async def test_alternatives_and_lines(tmp_path: Path) -> None:
    text, (line, character) = without(TWO)
    file = tmp_path / "a.py"
    file.write_text(text, encoding="utf-8")
    async with running() as server:
        options = {"cmd": LSP, "server": server.address, "settings": {"debounceMs": 0}}
        async with neovim(NVIM, RECIPE, options, [file]) as nvim:
            await nvim.until("return specdec.status and specdec.status.state", "ready")
            await nvim.call("nvim_win_set_cursor", 0, [line + 1, character])
            await nvim.type("A")
            await nvim.until(GHOST, TWO)
            seen = [TWO]
            for _ in range(2):
                await nvim.type("<M-]>")
                await nvim.until("return specdec.suggestion() ~= ...", True, seen[-1])
                seen.append(await nvim.lua("return specdec.suggestion()"))
            assert len({*seen}) == 3
            await nvim.type("<M-[><M-[>")
            await nvim.until(GHOST, TWO)
            await nvim.type("<M-Down>")
            await nvim.until(TEXT, BOOK.replace(TWO, ONE).rstrip("\n"))
            await nvim.until(GHOST, REST)
            await nvim.type("<M-Down>")
            await nvim.until(TEXT, BOOK.rstrip("\n"))


async def test_an_older_version_is_rejected_in_one_sentence() -> None:
    async with neovim(NVIM, RECIPE, {}, []) as nvim:
        stub = "vim.fn.has = function() return 0 end; vim.notify = function(text) said[#said + 1] = text end;"
        said = await nvim.lua(f"local said = {{}}; {stub} dofile(...).setup({{}}); return said", str(RECIPE))
    assert said == ["specdec needs Neovim 0.10 or later"]
