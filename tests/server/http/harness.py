"""A whole server in a separate thread, called over a real socket."""

from __future__ import annotations

import asyncio
import json
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from server.body_budget import MAX_MESSAGE_BYTES
from server.serving import Addresses, Serving
from specdec.config import EngineConfig
from specdec.core.types import EngineLoad
from tests.fake_engine import ECHO
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import make_config, quick_policy

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
MESSAGES, RESPOND = "/v1/messages", "/v1/responses"


class Server:
    """A running server and a client of it."""

    def __init__(
        self, serving: Serving, loop: asyncio.AbstractEventLoop, addresses: Addresses, tls: ssl.SSLContext | None = None
    ) -> None:
        self.serving, self.loop, port, self.grpc_port = serving, loop, addresses.http_port, addresses.grpc_port
        assert port is not None
        self.port = port
        self.url = f"http{'s' if tls else ''}://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=20, verify=tls or True)

    def ask(self, path: str = COMPLETIONS, **body: Any) -> dict[str, Any]:
        """The JSON of an answer that must be 200."""
        response = self.client.post(path, json=body)
        assert response.status_code == 200, response.text
        found: dict[str, Any] = response.json()
        return found

    def refused(self, path: str = COMPLETIONS, **body: Any) -> tuple[int, dict[str, Any]]:
        """Status and error of an answer that must refuse."""
        response = self.client.post(path, json=body)
        assert response.status_code >= 400, response.text
        assert response.headers["content-type"] == "application/json"
        found: dict[str, Any] = response.json()["error"]
        return response.status_code, found

    def stream(self, path: str = COMPLETIONS, **body: Any) -> list[Any]:
        """Every event of a stream: its JSON, and "[DONE]"."""
        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            assert response.status_code == 200
            assert response.headers["content-type"] == "text/event-stream"
            return events(response.read())

    def named_stream(self, path: str, **body: Any) -> list[dict[str, Any]]:
        """Every event of a stream whose events have names, which are their types."""
        with self.client.stream("POST", path, json={"stream": True, **body}) as response:
            data = response.read()
            assert response.status_code == 200, data
            assert response.headers["content-type"] == "text/event-stream"
        parts = [event.split(b"\n", 1) for event in data.removesuffix(b"\n\n").split(b"\n\n")]
        found = events(b"\n\n".join(rest for _, rest in parts) + b"\n\n")
        assert [name for name, _ in parts] == [f"event: {event['type']}".encode() for event in found]
        return found

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Run ``work`` in the server's loop."""
        return asyncio.run_coroutine_threadsafe(work, self.loop).result(20)

    @property
    def load(self) -> EngineLoad:
        """The load that the engine last reported; its prefix counter counts aborts."""
        return self.serving.client.engine.load

    def comes_to(self, condition: Callable[[], bool], seconds: float = 8) -> bool:
        """Whether ``condition`` holds before long."""
        end = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > end:
                return False
            time.sleep(0.02)
        return True

    def idle(self, aborts: int) -> bool:
        """Whether nothing runs and so many requests were aborted, before long."""
        return self.comes_to(
            lambda: (
                (self.load.prefix_hit_tokens, self.load.running_requests, self.serving.client.in_flight)
                == (aborts, 0, 0)
            )
        )


def events(data: bytes) -> list[Any]:
    """Parse the events of a stream; checks the framing byte by byte."""
    assert data.endswith(b"\n\n")
    found: list[Any] = []
    for event in data[:-2].split(b"\n\n"):
        assert event.startswith(b"data: ")
        assert b"\n" not in event
        text = event.removeprefix(b"data: ").decode()
        found.append(text if text == "[DONE]" else json.loads(text))
        if text != "[DONE]":
            assert text == json.dumps(found[-1], separators=(",", ":"), ensure_ascii=False)  # compact
    return found


@contextmanager
def running(
    tokenizer: Callable[[], Any] = FakeTokenizer,
    *,
    wait: bool = True,
    fim: Any = None,
    factory: str | None = None,
    engine: EngineConfig | None = None,
    tls: ssl.SSLContext | None = None,
    max_message_bytes: int = MAX_MESSAGE_BYTES,
    **config: Any,
) -> Iterator[Server]:
    """Run a server, which is ready unless not to ``wait``. With TLS, ``tls`` is what its client trusts."""
    settings = make_config(**({"http_port": 0} | config))
    if engine is not None:
        settings = settings.model_copy(update={"engine": engine})

    def make() -> Serving:
        return Serving(
            settings, lambda _: tokenizer(), factory=factory or ECHO, policy=quick_policy(silent_s=2.0),
            max_message_bytes=max_message_bytes,
        )  # fmt: skip

    with running_serving(make, wait=wait, tls=tls) as server:
        if fim is not None:
            server.serving.models.first.maker.packer = fim
        yield server


@contextmanager
def running_serving(
    make: Callable[[], Serving], *, wait: bool = True, tls: ssl.SSLContext | None = None
) -> Iterator[Server]:
    """The server that ``make`` makes in its own loop."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()

    def run(work: Coroutine[Any, Any, Any]) -> Any:
        return asyncio.run_coroutine_threadsafe(work, loop).result(30)

    async def made() -> Serving:
        return make()

    serving: Serving = run(made())
    addresses = run(serving.start())
    try:
        if wait:
            run(serving.wait_ready())
        server = Server(serving, loop, addresses, tls)
        with server.client:
            yield server
    finally:
        run(serving.stop())
        loop.call_soon_threadsafe(loop.stop)
        thread.join(10)
        loop.close()
