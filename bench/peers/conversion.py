"""Other forms of a .gguf model for the other engines, each made once, in a process of its own."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from bench.peers.peer import PeerError

_SHOWN = 300


async def converted(module: str, source: Path, target: Path) -> Path:
    """``target``, made by ``python -m module SOURCE TARGET`` unless it is there already.

    Raises:
        PeerError: it could not be made; holds the last words.
    """
    if target.exists():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    words = [sys.executable, "-m", module, str(source), str(target)]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        said, _ = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    if process.returncode != 0:
        raise PeerError(f"{source.name} could not be converted: {said.decode('utf-8', 'replace').strip()[-_SHOWN:]}")
    return target
