"""Two engines of one server: chat is the echo, fim the book, which fills in; both have memory on a machine of a few
petabytes. Imports little: every engine process begins with it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from server.interfaces import EngineLike, ProgressListener
from specdec.config import EngineConfig
from specdec.errors import ModelError
from tests.server import fake_engine
from tests.server.completion import book_engine

FACTORY = "tests.server.several_engines:build"
CHAT, CODER = "echo-1", "book-2"
MACHINE_BYTES, NEEDED_BYTES = 4 << 50, 2 << 50


def build(config: EngineConfig, progress: ProgressListener) -> EngineLike:
    """The factory the engine processes are given; ``kv_tokens`` in the way of the other one do not fit."""
    engine: Any = (book_engine if config.target == CODER else fake_engine).build(config, progress)
    needed = NEEDED_BYTES + config.kv_tokens
    if needed + config.spare_bytes > MACHINE_BYTES:
        raise ModelError(f"memory: too little; lower engine.kv_tokens from {config.kv_tokens}")
    info = replace(engine.info(), target=config.target, threads=config.threads, memory_bytes=needed)
    engine.info = lambda: info
    found: EngineLike = engine
    return found
