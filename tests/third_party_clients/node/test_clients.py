"""The HTTP face driven by npm's `openai`, `ollama` and `@continuedev/openai-adapters`."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.server.fake_tokenizer import BOS, FakeTokenizer
from tests.server.http.calls import Fim
from tests.server.http.harness import Server, running
from tests.third_party_clients.node_packages import fetched

Drive = Callable[[str], Any]
BEGIN = chr(BOS)

pytestmark = [
    pytest.mark.node,
    pytest.mark.skipif(shutil.which("npm") is None, reason="needs Node.js with npm"),
]


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """A ready server whose model supports chat, tools, and fill-in-the-middle."""
    with running(lambda: FakeTokenizer(has_tools=True), fim=Fim()) as found:
        yield found


@pytest.fixture(scope="module")
def drive(server: Server) -> Drive:
    """Run a scenario; returns what its client received."""
    folder = fetched(Path(__file__).parent, "drive.mjs")

    def run(scenario: str) -> Any:
        command = ["node", "drive.mjs", server.url, scenario]
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=60)
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    return run


def texts(chunks: list[dict[str, Any]]) -> str:
    """The text of a stream; none of its chunks may lack a choice, which Continue would break at."""
    return "".join(chunk["choices"][0]["text"] for chunk in chunks)


def text_of(chunks: list[dict[str, Any]]) -> str:
    """The same of a chat, but for a last chunk with nothing but the usage."""
    return "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks if chunk["choices"])


def test_openai(drive: Drive) -> None:
    found = drive("openai")
    assert found["completion"]["choices"][0]["text"] == texts(found["completionStream"]) == f"{BEGIN}hel"
    assert found["completion"]["usage"]["completion_tokens"] == 4
    assert found["gap"]["choices"][0]["text"] == "\x01a\x02b"
    assert found["chat"]["choices"][0]["message"]["content"] == text_of(found["chatStream"]) == "user:h"
    assert found["chatStream"][-1]["usage"]["completion_tokens"] == 6
    assert [model["id"] for model in found["models"]] == ["fake"]
    assert [(found[name]["kind"], found[name]["status"]) for name in ("missing", "bad", "full")] == [
        ("NotFoundError", 404), ("BadRequestError", 400), ("RateLimitError", 429),
    ]  # fmt: skip
    assert "temperature" in found["bad"]["message"]


def test_openai_calls_tools(drive: Drive) -> None:
    choice = drive("openaiTools")
    (call,) = choice["message"]["tool_calls"]
    assert (call["function"]["name"], json.loads(call["function"]["arguments"])) == ("look", {"at": 1})


def test_continue(drive: Drive) -> None:
    found = drive("continue")
    assert len(found) == 6
    for seen in found.values():
        assert seen["completion"]["choices"][0]["text"] == texts(seen["completionStream"]) == f"{BEGIN}hel"
        assert seen["chat"]["choices"][0]["message"]["content"] == text_of(seen["chatStream"]) == "user:h"
        assert [model["id"] for model in seen["models"]] == ["fake"]


@pytest.mark.parametrize(
    ("scenario", "path"), [("continueMistral", "/v1/fim/completions"), ("continueDeepseek", "/beta/completions")]
)
def test_continue_fills_in_the_middle(drive: Drive, server: Server, scenario: str, path: str) -> None:
    if path not in server.client.get("/openapi.json").json()["paths"]:
        pytest.skip(f"nothing is served at {path}")
    assert "".join(chunk["choices"][0]["delta"]["content"] for chunk in drive(scenario)) == "\x01a\x02b"


def test_ollama(drive: Drive) -> None:
    found = drive("ollama")
    for whole, stream, text in (("generate", "generateStream", "user:h"), ("chat", "chatStream", "user:h")):
        parts = [part.get("response", part.get("message", {}).get("content")) for part in found[stream]]
        assert "".join(parts) == found[whole].get("response", found[whole].get("message", {}).get("content")) == text
        assert found[stream][-1]["done_reason"] == "length"
    assert found["gap"]["response"] == "\x01a\x02b\x03"
    assert [model["name"] for model in found["list"]["models"]] == ["fake"]
    assert [model["context_length"] for model in found["ps"]["models"]] == [128]
    assert found["show"]["capabilities"] == ["completion", "insert", "tools"]
    assert found["version"]["version"]
    assert (found["missing"]["kind"], found["missing"]["status"]) == ("ResponseError", 404)
    assert found["missing"]["message"].startswith("model not found: ")
    assert found["broken"]["message"] == "no finite logit"


@pytest.mark.parametrize("scenario", ["openaiAbort", "ollamaAbort"])
def test_a_client_that_aborts_cancels_its_request(drive: Drive, server: Server, scenario: str) -> None:
    aborts = server.load.prefix_hit_tokens
    assert drive(scenario)["chunks"] < 20
    assert server.idle(aborts + 1)
