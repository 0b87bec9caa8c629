"""Streams that are silent for long, as while a long prompt is read, get comments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

import server.http.call
from server.http.call import EVENT_STREAM, Call
from tests.server.http.calls import make_context, receiving
from tests.server.http.harness import CHAT, MESSAGES, RESPOND, Server, running

HELLO = [{"role": "user", "content": "hello"}]
SILENT: dict[str, Any] = {"stream": True, "max_tokens": 6, "cache_salt": "slow"}


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.setattr(server.http.call, "SILENT_S", 0.01)
    with running() as found:
        yield found


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/completions", {"prompt": "hello"}),
        (CHAT, {"messages": HELLO}),
        (MESSAGES, {"messages": HELLO}),
        (RESPOND, {"input": "hello"}),
        ("/completion", {"prompt": "hello"}),
    ],
)
def test_a_silent_stream_gets_comments(hasty: Server, path: str, asked: dict[str, Any]) -> None:
    data = hasty.client.post(path, json={**SILENT, **asked}).content
    assert data.count(b":\n\n") > 1
    assert data.endswith(b"\n\n")
    for event in data[:-2].split(b"\n\n"):
        assert event == b":" or event.startswith((b"data: ", b"event: "))


async def test_a_comment_is_written_only_after_a_silence_and_before_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[bytes] = []
    sleep, passed = asyncio.sleep, asyncio.Semaphore(0)  # one release: `SILENT_S` have passed

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    async def waits(_: float) -> None:
        await passed.acquire()

    async def pass_time() -> None:
        passed.release()
        for _ in range(5):
            await sleep(0)

    monkeypatch.setattr(asyncio, "sleep", waits)
    call = Call({"headers": []}, receiving(), send, make_context())
    await call.start_stream(EVENT_STREAM)
    await sleep(0)
    await call.write(b"piece")
    await pass_time()
    assert sent == [b"", b"piece"]
    await pass_time()
    assert sent == [b"", b"piece", b":\n\n"]
    await call.finish(b"end")
    await pass_time()
    assert sent == [b"", b"piece", b":\n\n", b"end"]


def test_others_get_none(hasty: Server) -> None:
    whole = hasty.client.post("/v1/completions", json={**SILENT, "prompt": "hello", "stream": False})
    assert json.loads(whole.content)["choices"]
    lines = hasty.client.post("/api/generate", json={"model": "fake", "prompt": "hello", "cache_salt": "slow"})
    assert all(json.loads(line) for line in lines.content.splitlines())
    quick = hasty.client.post("/v1/completions", json={"prompt": "hello", "stream": True})
    assert b":\n\n" not in quick.content


def test_clients_skip_comments(hasty: Server) -> None:
    ours = openai.OpenAI(base_url=f"{hasty.url}/v1", api_key="none")
    body = {"cache_salt": "slow"}
    chunks = list(ours.completions.create(model="fake", prompt="hello", stream=True, extra_body=body))
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices).endswith("hello")
