"""Python clients and frameworks against a real server with a real model: all see the same text, streamed or not."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.third_party_clients.conftest import MODEL
from tests.third_party_clients.environments import PYTHON

pytestmark = pytest.mark.slow
Seen = dict[str, Any]
Drive = Callable[[str], Seen]
LIMIT = 24
ASKED: dict[str, Any] = {"model": MODEL, "temperature": 0, "max_tokens": LIMIT}
MESSAGES = [{"role": "user", "content": "Why is the sky blue?"}]
PROMPT = "The capital of France is"
BEFORE, BEHIND = "def add(a, b):\n    return ", "\n\nprint(add(1, 2))\n"


@pytest.fixture(scope="module")
def plain(url: str) -> Iterator[Seen]:
    """The same questions without any client."""
    with httpx.Client(base_url=url, timeout=60) as http:

        def ask(path: str, **body: Any) -> Any:
            response = http.post(path, json=ASKED | body)
            assert response.status_code == 200, response.text
            return response.json()["choices"][0]

        yield {
            "chat": ask("/v1/chat/completions", messages=MESSAGES)["message"]["content"],
            "text": ask("/v1/completions", prompt=PROMPT)["text"],
            "gap": ask("/v1/completions", prompt=BEFORE, suffix=BEHIND)["text"],
        }


@pytest.fixture(scope="module")
def drive(url: str) -> Drive:
    """Return what a client received."""
    if not PYTHON.is_installed():
        pytest.skip("the clients are not installed: `make clients`")

    def run(client: str) -> Seen:
        command = [PYTHON.python, Path(__file__).with_name("drive.py"), url, MODEL, client]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
        assert done.returncode == 0, done.stderr[-4000:]
        found: Seen = json.loads(done.stdout.splitlines()[-1])
        return found

    return run


def check(found: Seen, plain: Seen) -> None:
    """Check that the client receives what the server sends without a client."""
    same = {"chat": "chat", "stream": "chat", "ollama": "chat", "vllm": "chat", "text": "text", "gap": "gap"}
    for name, value in found.items():
        if name in same:
            assert value == plain[same[name]], name
        elif name == "json":
            assert set(json.loads(value)) == {"city", "people"}
        elif name == "models":
            assert MODEL in value


def test_openai(drive: Drive, plain: Seen) -> None:
    found = drive("openai")
    check(found, plain)
    assert found["parsed"] == "City"
    assert found["echo"] == PROMPT + found["text"]


def test_openai_agents(drive: Drive, plain: Seen) -> None:
    found = drive("openai_agents")
    check(found, plain)
    assert found["whole"].startswith(plain["chat"])


def test_ollama(drive: Drive, plain: Seen) -> None:
    found = drive("ollama")
    check(found, plain)
    assert found["echo"] == found["chat"]


@pytest.mark.parametrize(
    "client",
    [
        "anthropic", "mistralai", "langchain_openai", "langchain_ollama", "litellm", "llama_index", "instructor",
        "pydantic_ai", "llm", "dspy", "smolagents", "haystack",
    ],
)  # fmt: skip
def test_client(drive: Drive, plain: Seen, client: str) -> None:
    found = drive(client)
    assert found
    check(found, plain)


def test_lm_eval(drive: Drive) -> None:
    found = drive("lm_eval")
    (likely, greedy), (unlikely, other) = found["scores"]
    assert unlikely < likely < 0
    assert (greedy, other) == (True, False)
    assert found["rolling"] < 0
    assert found["until"].startswith(" Paris")
