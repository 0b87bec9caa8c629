"""Several models on one port: chat is the echo, coder the book, which fills in; both have memory on a machine of a few
petabytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from server.interfaces import EngineLike, ProgressListener
from server.serving import Serving
from specdec.config import Config, EngineConfig
from specdec.errors import ModelError
from tests.server import fake_engine
from tests.server.completion import book_engine
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import quick_policy
from tests.server.http.harness import Server, running_serving

FACTORY = "tests.server.several_engines:build"
CHAT, CODER = "echo-1", "book-2"
MACHINE_BYTES, NEEDED_BYTES = 4 << 50, 2 << 50
ENGINES: dict[str, dict[str, Any]] = {
    "chat": {"target": CHAT, "aliases": ["gpt-4o"], "threads": 1},
    "fim": {"target": CODER, "aliases": ["codestral"], "threads": 1},
}


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


def make_several(engines: dict[str, dict[str, Any]] | None = None, **server: Any) -> Config:
    """A configuration of ``engines`` (default: chat, which is the first, and fim) on free ports."""
    ports = {"grpc_port": 0, "http_port": 0, "heartbeat_timeout_s": 5.0}
    return Config.model_validate({"engines": engines or ENGINES, "server": ports | server})


def serving(config: Config, give_up_after: int = 5) -> Callable[[], Serving]:
    """What makes the server."""

    def tokenizer(engine: EngineConfig) -> Any:
        return CodeTokenizer() if engine.target == CODER else FakeTokenizer()

    return lambda: Serving(config, tokenizer, factory=FACTORY, policy=quick_policy(give_up_after))


@contextmanager
def several(engines: dict[str, dict[str, Any]] | None = None, **server: Any) -> Iterator[Server]:
    """A ready server."""
    with running_serving(serving(make_several(engines, **server))) as found:
        yield found
