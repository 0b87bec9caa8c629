"""`specdec serve` with the scripted engine, for the replicas of a test's fleet.

cluster.yaml's ``python`` names a program that starts this module, so that all else is as in a real fleet.
"""

from __future__ import annotations

import asyncio
import stat
import sys
from pathlib import Path

from server.serving import Serving
from specdec.config import load_config
from tests.fake_engine import SCRIPTED
from tests.server.fake_tokenizer import ScriptedTokenizer


def program(folder: Path) -> Path:
    """An executable in place of a replica's Python."""
    script = folder / "python"
    root = Path(__file__).parents[2]
    script.write_text(
        f'#!/bin/sh\ncd {root}\nPYTHONPATH={root} exec {sys.executable} -m {__name__} "$@"\n', encoding="utf-8"
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


async def main() -> None:
    """Serves by the configuration file that is the last argument."""
    config = load_config(Path(sys.argv[-1]))
    serving = Serving(config, lambda _: ScriptedTokenizer(), factory=SCRIPTED)
    await serving.run(lambda addresses, info: print("ready", addresses, flush=True))


if __name__ == "__main__":
    asyncio.run(main())
