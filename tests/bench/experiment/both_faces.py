"""A whole server with the fake engine, reached over gRPC and over HTTP."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from server.serving import Serving
from tests.fake_engine import ECHO
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import make_config, quick_policy


class Faces(NamedTuple):
    """The server's URLs."""

    grpc: str
    http: str


@contextmanager
def both_faces(**server: Any) -> Iterator[Faces]:
    """A ready server; ``server``: fields of its configuration."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def make() -> Serving:
        config = make_config(http_port=0, **server)
        return Serving(config, lambda _: FakeTokenizer(), factory=ECHO, policy=quick_policy())

    serving: Serving = run(make())
    addresses = run(serving.start())
    try:
        run(serving.wait_ready())
        yield Faces(f"grpc://127.0.0.1:{addresses.grpc_port}", f"http://127.0.0.1:{addresses.http_port}/v1")
    finally:
        run(serving.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
