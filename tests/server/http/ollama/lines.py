"""Reads Ollama's streams."""

from __future__ import annotations

import json
from datetime import datetime
from typing import Any

from tests.server.http.harness import Server

GENERATE, CHAT, SHOW = "/api/generate", "/api/chat", "/api/show"
FIGURES = {
    "total_duration": 4_500_000, "load_duration": 500_000, "prompt_eval_duration": 1_500_000,
    "eval_duration": 2_500_000,
}  # fmt: skip


def lines(server: Server, path: str = GENERATE, **body: Any) -> list[dict[str, Any]]:
    """Return every object of a stream, which is Ollama's default, and check its framing byte by byte."""
    with server.client.stream("POST", path, json=body) as response:
        data = response.read()
        assert response.status_code == 200, data
        assert response.headers["content-type"] == "application/x-ndjson"
    assert data.endswith(b"\n")
    found = []
    for line in data[:-1].split(b"\n"):
        found.append(json.loads(line))
        assert line.decode() == json.dumps(found[-1], separators=(",", ":"), ensure_ascii=False)  # compact
    assert [one["done"] for one in found] == [False] * (len(found) - 1) + [True]
    return found


def timed(answer: dict[str, Any]) -> dict[str, Any]:
    """``answer`` without the time, which is looked at here."""
    made = datetime.fromisoformat(answer.pop("created_at"))
    assert abs(made.timestamp() - datetime.now(made.tzinfo).timestamp()) < 60
    return answer


def refused(server: Server, path: str, status: int, **body: Any) -> str:
    """The message of an answer that must refuse, in Ollama's shape."""
    response = server.client.post(path, json=body)
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert set(response.json()) == {"error"}
    message = response.json()["error"]
    assert isinstance(message, str)
    return message
