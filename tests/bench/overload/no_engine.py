"""An engine that can not be had."""

from __future__ import annotations

from typing import Any, NoReturn

from specdec.config import EngineConfig
from specdec.errors import ModelError


def build(config: EngineConfig, progress: Any) -> NoReturn:
    """The factory that the engine process is given."""
    raise ModelError(f"{config.target} is not there")
