"""The Neovim recipe in a real Neovim."""

from __future__ import annotations

import asyncio
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from specdec.api.generate import ROOT
from tests.editors.neovim import Neovim, neovim
from tests.fake_engine import BOOK
from tests.server.lsp.editor import LSP, position, running, without

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


async def counted(outcomes: Counter[str], name: str) -> bool:
    """Return whether one outcome of a kind is eventually counted."""
    for _ in range(200):
        if outcomes[name] == 1:
            return True
        await asyncio.sleep(0.02)
    return False


@asynccontextmanager
async def editing(folder: Path, content: bytes) -> AsyncIterator[Neovim]:
    """A Neovim with a Python file of ``content``, once the language server is ready. Typing has no pause."""
    file = folder / "a.py"
    file.write_bytes(content)
    async with running() as server:
        options = {"cmd": LSP, "server": server.address, "settings": {"debounceMs": 0}}
        async with neovim(NVIM, RECIPE, options, [file]) as nvim:
            await nvim.until("return specdec.status and specdec.status.state", "ready")
            yield nvim


async def test_typing_and_accepting(tmp_path: Path) -> None:
    text, (line, character) = without(LINE)
    file = tmp_path / "a.py"
    file.write_text(text, encoding="utf-8")
    async with running() as server:
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
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
            assert outcomes["rejected"] == 0


async def test_undo_takes_back_an_accepted_suggestion_and_no_more(tmp_path: Path) -> None:
    text, (line, character) = without(LINE)
    async with editing(tmp_path, text.encode()) as nvim:
        await nvim.call("nvim_win_set_cursor", 0, [line + 1, character])
        await nvim.type("Atot")
        await nvim.until(GHOST, LINE[3:])
        await nvim.type("<Tab>")
        await nvim.until(TEXT, BOOK.rstrip("\n"))
        await nvim.type("<Esc>u")
        await nvim.until(TEXT, BOOK.replace(LINE, "tot").rstrip("\n"))


ONE, REST = "total = 0", "\n    for value in values:"
TWO = ONE + REST


async def test_alternatives_and_lines(tmp_path: Path) -> None:
    text, (line, character) = without(TWO)
    async with editing(tmp_path, text.encode()) as nvim:
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


# What the diff of a predicted edit removes and adds, and the cursor's line.
DIFF = """
local found = {}
for _, mark in ipairs(vim.api.nvim_buf_get_extmarks(0, -1, 0, -1, { details = true })) do
  local row, column, more = mark[2], mark[3], mark[4]
  if more.hl_group == 'DiffDelete' then
    local text = vim.api.nvim_buf_get_text(0, row, column, more.end_row, more.end_col, {})
    found[#found + 1] = '-' .. table.concat(text, '\\n')
  end
  for _, chunk in ipairs(more.virt_text or {}) do found[#found + 1] = '+' .. chunk[1] end
  for _, line in ipairs(more.virt_lines or {}) do found[#found + 1] = '+' .. line[1][1] end
end
return table.concat(found, '|')
"""
ROW = "return vim.api.nvim_win_get_cursor(0)[1]"
EDITS = {"debounceMs": 0, "editModel": "book"}


async def test_predicted_edits_are_shown_dismissed_jumped_to_and_taken(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(BOOK, encoding="utf-8")
    line, character = position(BOOK, BOOK.index("values):"))
    async with running() as server:
        options = {"cmd": LSP, "server": server.address, "settings": EDITS}
        async with neovim(NVIM, RECIPE, options, [file]) as nvim:
            await nvim.until("return specdec.status and specdec.status.state", "ready")
            await nvim.call("nvim_win_set_cursor", 0, [line + 1, character])
            await nvim.type("cwnumbers<Esc>")
            await nvim.until(DIFF, "-value|+number")
            await nvim.type("<Esc>")
            await nvim.until(DIFF, "")
            await nvim.type("j")
            assert await nvim.lua(DIFF) == ""
            await nvim.type("x")  # another text
            await nvim.until(DIFF, "-value|+number")
            await nvim.type("u")
            for row, diff in ((9, "-value|+number"), (12, "-value|+number"), (14, "-value|+number")):
                await nvim.until(DIFF, diff)
                await nvim.type("<Tab>")
                await nvim.until(ROW, row)
                await nvim.type("<Tab>")
                await nvim.until(f"return vim.fn.getline({row}):find('values') == nil", True)
            await nvim.until(TEXT, BOOK.replace("values", "numbers").rstrip("\n"))
            await nvim.until(DIFF, "")
            outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
            async with asyncio.timeout(20):
                while not outcomes["accepted"]:
                    await asyncio.sleep(0.02)
            assert outcomes["rejected"] == 1
            assert outcomes["shown"] >= 3


async def test_an_insertion_predicted_at_the_cursor_is_ghost_text(tmp_path: Path) -> None:
    file = tmp_path / "a.py"
    file.write_text(BOOK, encoding="utf-8")
    async with running() as server:
        settings = {**EDITS, "timeLimitMs": 0.001}  # no completion comes in time
        options = {"cmd": LSP, "server": server.address, "settings": settings}
        async with neovim(NVIM, RECIPE, options, [file]) as nvim:
            await nvim.until("return specdec.status and specdec.status.state", "ready")
            await nvim.call("nvim_win_set_cursor", 0, [5, 0])
            await nvim.type("osum = ")
            suggestion = "return specdec.suggestion()"  # a predicted edit elsewhere may be shown too
            await nvim.until(suggestion, "0 + 0")
            await nvim.type("<M-Right>")
            await nvim.until(suggestion, " + 0")
            await nvim.type("<Tab>")
            await nvim.until(TEXT, BOOK.replace("\n\n\ndef mean", "\n\nsum = 0 + 0\n\ndef mean").rstrip("\n"))


# Answers requests of a method by a text at a range, or at the cursor. Before 0.11 a client's methods take no self.
ANSWER = """
local answered, text, range = ...
local client = vim.lsp.get_clients({ name = 'specdec' })[1]
local request = client.request
client.request = function(...)
  local method, params, take = select(vim.fn.has('nvim-0.11') == 1 and 2 or 1, ...)
  if method ~= answered then return request(...) end
  local at = range or { start = params.position, ['end'] = params.position }
  local item = { insertText = text, text = text, range = at }
  vim.schedule(function() take(nil, { item, edits = { item } }) end)
  return true, 0
end
"""


@pytest.mark.parametrize(
    ("method", "keys", "shows", "shown", "text"),
    [
        ("textDocument/inlineCompletion", "A", GHOST, "one\ntwo", "abone\ntwo\nc"),
        ("textDocument/copilotInlineEdit", "x", DIFF, "+one|+two", "one\ntwo\nb\nc"),
    ],
)
async def test_a_file_with_crlf_gets_no_other_line_ends(
    method: str, keys: str, shows: str, shown: str, text: str, tmp_path: Path
) -> None:
    async with editing(tmp_path, b"ab\r\nc\r\n") as nvim:
        await nvim.lua(ANSWER, method, "one\r\ntwo" if keys == "A" else "one\r\ntwo\r\n")
        await nvim.type(keys)
        await nvim.until(shows, shown)
        await nvim.type("<Tab>")
        await nvim.until(TEXT, text)


# Collects the notifications about suggestions.
NOTIFIED = """
_G.notified = {}
local client = vim.lsp.get_clients({ name = 'specdec' })[1]
local notify = client.notify
client.notify = function(...)
  local method = select(vim.fn.has('nvim-0.11') == 1 and 2 or 1, ...)
  if method:match('Completion$') then notified[#notified + 1] = method:match('did(%u%l+)') end
  return notify(...)
end
"""


async def test_a_suggestion_that_is_typed_by_hand_is_not_dismissed(tmp_path: Path) -> None:
    async with editing(tmp_path, b"ab\n") as nvim:
        await nvim.lua(NOTIFIED)
        await nvim.lua(ANSWER, "textDocument/inlineCompletion", "c")
        await nvim.type("A")
        await nvim.until("return notified", ["Show"])
        await nvim.type("c")
        await nvim.until("return notified", ["Show", "Show"])  # of the next suggestion
        await nvim.type("d")
        await nvim.until("return notified", ["Show", "Show", "Dismiss", "Show"])


async def test_a_suggestion_follows_what_is_typed_while_the_menu_is_open(tmp_path: Path) -> None:
    behind_a = {"line": 0, "character": 1}
    async with editing(tmp_path, b"a\nabc\n") as nvim:
        await nvim.call("nvim_command", "set completeopt=menuone,noselect")
        await nvim.lua(ANSWER, "textDocument/inlineCompletion", "bcd", {"start": behind_a, "end": behind_a})
        await nvim.type("A")
        await nvim.until(GHOST, "bcd")
        await nvim.type("<C-x><C-n>")
        await nvim.until("return vim.fn.pumvisible()", 1)
        await nvim.type("b")
        await nvim.until("return specdec.suggestion()", "cd")
        await nvim.type("<Tab>")
        await nvim.until(TEXT, "abcd\nabc")


async def test_a_word_has_letters_beyond_ascii(tmp_path: Path) -> None:
    async with editing(tmp_path, b"ab\n") as nvim:
        await nvim.lua(ANSWER, "textDocument/inlineCompletion", "größe = 1")
        await nvim.type("A")
        await nvim.until(GHOST, "größe = 1")
        await nvim.type("<M-Right>")
        await nvim.until(TEXT, "abgröße")


async def test_the_status_shows_that_the_language_server_has_ended(tmp_path: Path) -> None:
    async with editing(tmp_path, b"ab\n") as nvim:
        await nvim.lua("vim.lsp.get_clients({ name = 'specdec' })[1].rpc.terminate()")
        await nvim.until("return specdec.status.state", "away")


@pytest.mark.parametrize("start", [(2, 0), (1, 0)])
async def test_an_edit_behind_the_last_line_break_is_taken(start: tuple[int, int], tmp_path: Path) -> None:
    where = {"start": {"line": start[0], "character": start[1]}, "end": {"line": 2, "character": 0}}
    async with editing(tmp_path, b"ab\nc\n") as nvim:
        await nvim.lua(ANSWER, "textDocument/copilotInlineEdit", "d\ne\n", where)
        await nvim.type("x")
        await nvim.until(DIFF, "+d|+e" if start[0] == 2 else "-c|+d|+e")
        await nvim.type("<Tab><Tab>")
        await nvim.until(TEXT, "b\nc\nd\ne" if start[0] == 2 else "b\nd\ne")


async def test_an_older_version_is_rejected_in_one_sentence() -> None:
    async with neovim(NVIM, RECIPE, {}, []) as nvim:
        stub = "vim.fn.has = function() return 0 end; vim.notify = function(text) said[#said + 1] = text end;"
        said = await nvim.lua(f"local said = {{}}; {stub} dofile(...).setup({{}}); return said", str(RECIPE))
    assert said == ["specdec needs Neovim 0.10 or later"]
