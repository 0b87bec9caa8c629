"""A fake engine that notes every request as it gets it, in ``engine.cache_dir``, and answers it as
`tests.server.fake_admin_engine` does.

The script ``odd`` makes its tokens depend on ``speculation.width``, which no true engine may let happen; ``held`` says
one token and then nothing, until it is aborted.
"""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

from server.interfaces import ProgressListener
from specdec.config import EngineConfig
from specdec.core.types import EngineInfo, Request, RequestEvent
from tests.server.fake_admin_engine import FakeAdminEngine
from tests.server.fake_engine import _Running

FACTORY = "tests.server.experiment.live.options_engine:build"
_NOTES = "requests.jsonl"


class OptionsEngine(FakeAdminEngine):
    """Two places for sequences."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        self._path = config.cache_dir / _NOTES

    def submit(self, request: Request) -> None:
        note = {
            "text": bytes(request.prompt_ids).decode("latin-1").removeprefix("\x02"),
            "id": request.request_id.partition(":")[2],
            "mode": request.speculation.mode.value,
            "width": request.speculation.width,
            "depth": request.speculation.max_depth,
            "priority": request.priority,
            "tpot": request.target_tpot_ms,
            "salt": request.cache_salt,
            "seed": request.sampling.seed,
            "draft": self._draft,
            "flushed": self._flushed,
        }
        with self._path.open("a") as out:
            out.write(json.dumps(note) + "\n")
        if request.cache_salt.endswith("odd") and request.speculation.width == 2:
            request = dataclasses.replace(request, prompt_ids=tuple(reversed(request.prompt_ids)))
        super().submit(request)

    _flushed = 0

    def flush_cache(self) -> int:
        self._flushed += 1
        return super().flush_cache()

    def _advance(self, running: _Running) -> list[RequestEvent]:
        if running.request.cache_salt == "held" and any(running.emitted.values()):
            time.sleep(0.005)
            return []
        return super()._advance(running)

    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info(), max_batch=2, indexes=("docs", "code"))


def noted(folder: Path) -> list[dict[str, Any]]:
    """What the engine got, in order."""
    path = folder / _NOTES
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def build(config: EngineConfig, progress: ProgressListener) -> OptionsEngine:
    """The factory the engine process is given."""
    if config.target == "slow-start":
        time.sleep(0.2)
    return OptionsEngine(config)
