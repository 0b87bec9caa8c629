"""`supersedes_key` on HTTP: a newer call takes the place of the one with the same key, in every dialect."""

from __future__ import annotations

import threading
from typing import Any

import httpx
import pytest

from server.errors import SupersededError
from tests.server.http.harness import CHAT, COMPLETIONS, Server, events
from tests.server.http.test_openapi import HI
from tests.server.several_models import several

SLOW = {"cache_salt": "slow"}
CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "x" * 100, "max_tokens": 100}),
    (CHAT, {"messages": [{"role": "user", "content": "x" * 90}], "max_tokens": 100}),
    ("/completion", {"prompt": "x" * 100, "n_predict": 100}),
    ("/api/generate", {"prompt": "x" * 100, "options": {"num_predict": 100}, "raw": True}),
    ("/v1/fim/completions", {"prompt": "x" * 50, "suffix": "y" * 40, "max_tokens": 100}),
]


class Asked(threading.Thread):
    """A call on its way. Its first word has come once it is made."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._url, self._path, self._body = server.url, path, body
        self.status, self.data, self.began = 0, b"", threading.Event()
        self.headers = httpx.Headers()
        self.start()

    def run(self) -> None:
        with httpx.stream("POST", self._url + self._path, json=self._body, timeout=20) as response:
            self.status, self.headers = response.status_code, response.headers
            for piece in response.iter_raw():
                self.data += piece
                self.began.set()


def running_one(server: Server) -> bool:
    return server.comes_to(lambda: server.load.running_requests == 1)


@pytest.mark.parametrize(("path", "body"), CASES, ids=[path for path, _ in CASES])
def test_a_newer_call_cancels_the_older(path: str, body: dict[str, Any], server: Server) -> None:
    aborts = server.load.prefix_hit_tokens
    old = Asked(server, path, {**body, **SLOW, "supersedes_key": "k", "stream": False})
    assert running_one(server)
    server.ask(COMPLETIONS, prompt="ab", max_tokens=1, supersedes_key="k")
    old.join(15)
    assert old.status == 409
    assert old.headers["x-should-retry"] == "false"  # else OpenAI's client would repeat it, and end the newer call
    assert str(SupersededError()).encode() in old.data
    assert server.idle(aborts + 1)


def test_a_started_stream_ends_with_the_reason(server: Server) -> None:
    aborts = server.load.prefix_hit_tokens
    body = {"prompt": "x" * 100, "max_tokens": 100, "stream": True, **SLOW, "supersedes_key": "k"}
    old = Asked(server, COMPLETIONS, body)
    assert old.began.wait(10)
    server.ask(COMPLETIONS, prompt="ab", max_tokens=1, supersedes_key="k")
    old.join(15)
    assert old.status == 200
    *_, last = events(old.data)
    assert last["error"]["code"] == "superseded"
    assert server.idle(aborts + 1)


def test_other_keys_and_calls_without_a_key_are_not_cancelled(server: Server) -> None:
    aborts = server.load.prefix_hit_tokens
    old = Asked(server, COMPLETIONS, {"prompt": "x" * 20, "max_tokens": 20, **SLOW, "supersedes_key": "k"})
    assert running_one(server)
    for more in ({"supersedes_key": "other"}, {"supersedes_key": ""}, {}):
        server.ask(COMPLETIONS, prompt="ab", max_tokens=1, **more)
    old.join(15)
    assert old.status == 200
    assert server.idle(aborts)


def test_several_prompts_have_no_key(server: Server) -> None:
    status, error = server.refused(COMPLETIONS, prompt=["abc", "def"], max_tokens=3, supersedes_key="k")
    assert (status, error["param"]) == (400, "supersedes_key")


def test_the_key_must_be_text(server: Server) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
        status, error = server.refused(path, **body, supersedes_key=5)
        assert (status, error["param"]) == (400, "supersedes_key")


def test_a_key_covers_all_models() -> None:
    with several() as server:
        body = {"model": "chat", "prompt": "x" * 100, "max_tokens": 100}
        old = Asked(server, COMPLETIONS, {**body, **SLOW, "supersedes_key": "k"})
        assert running_one(server)
        server.ask(COMPLETIONS, model="fim", prompt="ab", max_tokens=1, supersedes_key="k")
        old.join(15)
        assert old.status == 409
        server.ask(COMPLETIONS, model="fim", prompt="ab", max_tokens=1, supersedes_key="k")  # it has been forgotten
