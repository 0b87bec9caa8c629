"""A Neovim without a screen, driven over its own RPC."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgpack


class Neovim:
    """Calls of Neovim's API, one at a time."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self._process, self._calls = process, 0
        self._messages = msgpack.Unpacker(raw=False, strict_map_key=False, ext_hook=lambda code, data: data)

    async def call(self, method: str, *args: Any) -> Any:
        """The result of an API function."""
        self._calls += 1
        assert self._process.stdin is not None
        self._process.stdin.write(msgpack.packb([0, self._calls, method, args]))
        async with asyncio.timeout(20):
            while True:
                kind, *rest = await self._read()
                if kind == 1 and rest[0] == self._calls:
                    assert rest[1] is None, rest[1]
                    return rest[2]

    async def lua(self, code: str, *args: Any) -> Any:
        """Return the value of a piece of Lua."""
        return await self.call("nvim_exec_lua", code, args)

    async def type(self, keys: str) -> None:
        """Press keys."""
        await self.call("nvim_input", keys)

    async def until(self, code: str, wanted: Any, *args: Any) -> None:
        """Wait until a piece of Lua returns the wanted value."""
        found = None
        for _ in range(300):
            found = await self.lua(code, *args)
            if found == wanted:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{code}: {found!r} instead of {wanted!r}")

    async def _read(self) -> Any:
        assert self._process.stdout is not None
        while True:
            for message in self._messages:
                return message
            data = await self._process.stdout.read(65536)
            assert data, "Neovim has ended"
            self._messages.feed(data)


@asynccontextmanager
async def neovim(program: str, recipe: Path, options: dict[str, Any], files: Sequence[Path]) -> AsyncIterator[Neovim]:
    """A Neovim with nothing but the recipe."""
    process = await asyncio.create_subprocess_exec(
        program, "--headless", "--embed", "-u", "NONE", "-i", "NONE", "-n",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        nvim = Neovim(process)
        await nvim.lua(
            "local path, options = ...; _G.specdec = dofile(path); specdec.setup(options)", str(recipe), options
        )
        await nvim.call("nvim_command", "filetype on")
        for file in files:
            await nvim.call("nvim_command", f"edit {file}")
        yield nvim
    finally:
        process.kill()
        await process.wait()
