"""`specdec serve` over the scripted engine: what a replica of a test's fleet runs instead of the real one.

cluster.yaml's ``python`` names a program that starts this module, so that all else is as in a real fleet. The numeric
fingerprint follows from ``engine.dtype``.
"""

from __future__ import annotations

import asyncio
import dataclasses
import stat
import sys
from pathlib import Path

from server.engine_process import ProgressListener
from server.serving import Serving
from specdec.config import EngineConfig, load_config
from specdec.types import EngineInfo
from tests.cluster.scripted_engine import ScriptedEngine, ScriptedTokenizer, build


class NumberedEngine:
    """A scripted engine with a fingerprint of its own."""

    def __init__(self, engine: ScriptedEngine, fingerprint: str) -> None:
        self._engine, self._fingerprint = engine, fingerprint

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)

    def info(self) -> EngineInfo:
        return dataclasses.replace(self._engine.info(), numeric_fingerprint=self._fingerprint)


def build_numbered(config: EngineConfig, progress: ProgressListener) -> NumberedEngine:
    """The factory that the engine's process is given."""
    return NumberedEngine(build(config, progress), f"numbers-{config.dtype}")


def program(folder: Path) -> Path:
    """An executable that takes the place of a replica's Python."""
    script = folder / "python"
    root = Path(__file__).parents[2]
    script.write_text(
        f'#!/bin/sh\ncd {root}\nPYTHONPATH={root} exec {sys.executable} -m {__name__} "$@"\n', encoding="utf-8"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


async def main() -> None:
    """Serve by the configuration whose path comes last on the command line."""
    config = load_config(Path(sys.argv[-1]))
    serving = Serving(config, lambda _: ScriptedTokenizer(), factory=f"{__spec__.name}:build_numbered")
    await serving.run(lambda addresses, info: print("ready", addresses, flush=True))


if __name__ == "__main__":
    asyncio.run(main())
