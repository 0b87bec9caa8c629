"""A server of several models on one port, with scripted engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from server.serving import Serving
from specdec.config import Config, EngineConfig
from tests.fake_engine import CHAT, CODER, SEVERAL
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import quick_policy
from tests.server.http.harness import Server, running_serving

ENGINES: dict[str, dict[str, Any]] = {
    "chat": {"target": CHAT, "aliases": ["gpt-4o"], "threads": 1},
    "fim": {"target": CODER, "aliases": ["codestral"], "threads": 1},
}


def make_several(engines: dict[str, dict[str, Any]] | None = None, **server: Any) -> Config:
    """A configuration of ``engines`` (default: chat, which is the first, and fim) on free ports."""
    ports = {"grpc_port": 0, "http_port": 0}
    return Config.model_validate({"engines": engines or ENGINES, "server": ports | server})


def serving(config: Config, give_up_after: int = 5) -> Callable[[], Serving]:
    """The arguments of the server."""

    def tokenizer(engine: EngineConfig) -> Any:
        return CodeTokenizer() if engine.target == CODER else FakeTokenizer()

    return lambda: Serving(config, tokenizer, factory=SEVERAL, policy=quick_policy(give_up_after, 5.0))


@contextmanager
def several(engines: dict[str, dict[str, Any]] | None = None, **server: Any) -> Iterator[Server]:
    """A ready server."""
    with running_serving(serving(make_several(engines, **server))) as found:
        yield found
