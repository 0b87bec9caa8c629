"""A foreign server with OpenAI's API, without salts and token ids; its answer depends on the question only."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class StubOpenAI(ThreadingHTTPServer):
    """``asked``: the bodies that came. From request ``stall_at`` on it says nothing until `release`; ``stalled`` is set
    then. ``suffix`` ends every answer."""

    daemon_threads = True

    def __init__(self, suffix: str = "") -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.suffix = suffix
        self.asked: list[dict[str, Any]] = []
        self.stall_at: int | None = None
        self.stalled, self.released = threading.Event(), threading.Event()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}/v1"

    def questions(self, **fields: Any) -> list[str]:
        """The prompts of bodies with these fields."""
        return [body["messages"][-1]["content"] for body in self.asked if fields.items() <= body.items()]

    def release(self) -> None:
        """End the stall."""
        self.stall_at = None
        self.released.set()

    def wait_in_stall(self) -> None:
        """Record a request, and stall if it is time."""
        if self.stall_at is not None and len(self.asked) >= self.stall_at:
            self.stalled.set()
            self.released.wait(120)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore broken connections: a killed client closes them."""


class _Handler(BaseHTTPRequestHandler):
    server: StubOpenAI
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "stub", "owned_by": "nobody"}]}), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.asked.append(body)
        self.server.wait_in_stall()
        question = body["messages"][-1]["content"]
        words = [*question.split()[:3], self.server.suffix]
        lines = [{"choices": [{"index": 0, "delta": {"content": word}}]} for word in words]
        lines.append({"choices": [], "usage": {"prompt_tokens": len(question), "completion_tokens": 4}})
        self._send("".join(f"data: {json.dumps(line)}\n\n" for line in lines) + "data: [DONE]\n\n", "text/event-stream")

    def log_message(self, format: str, *args: Any) -> None:
        """Log nothing."""

    def _send(self, text: str, kind: str) -> None:
        data = text.encode()
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


@contextmanager
def stub_openai(suffix: str = "") -> Iterator[StubOpenAI]:
    """A running stub."""
    with StubOpenAI(suffix) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield server
        finally:
            server.release()
            server.shutdown()
            thread.join(10)
