"""Verbatim requests of Tabby's editor agent, and what it needs of the answers."""

from __future__ import annotations

import json
import re
from typing import Any

from tests.fake_engine import BOOK
from tests.server.completion.editor import AT, BEHIND, LINE
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import Server, running
from tests.server.http.tabby.book_server import COMPLETIONS, EVENTS

AGENT = {
    "Authorization": "Bearer auth_0123456789abcdef", "Content-Type": "application/json",
    "User-Agent": "Node.js/v20.11.0 tabby-agent/1.8.0 Visual-Studio-Code/1.95.0 TabbyML.vscode-tabby/1.20.0",
}  # fmt: skip


def post(server: Server, path: str, body: dict[str, Any]) -> Any:
    """Post as the agent does. An answer with an error or without a 2xx status would make the agent reconnect."""
    data = json.dumps(body, separators=(",", ":"), ensure_ascii=False)
    response = server.client.post(path, content=data, headers=AGENT)
    assert response.status_code == 200, response.text
    return response


def test_the_agent_connects(server: Server) -> None:
    response = server.client.get("/v1/health", headers=AGENT)
    assert response.status_code == 200
    health = response.json()
    assert health["model"] == "book"  # else it offers no completion
    assert "chat_model" not in health  # the model has no chat template, so it shall offer no chat
    assert isinstance(health["device"], str)
    version = re.search(r"(\d+)\.(\d+)\.(\d+)", health["version"]["git_describe"])
    assert version is not None
    assert tuple(map(int, version.groups())) >= (0, 9, 0)  # otherwise it would not request settings
    wanted = {"arch": str, "cpu_info": str, "cpu_count": int, "cuda_devices": list, "models": dict}
    assert all(isinstance(health[name], kind) for name, kind in wanted.items())
    assert all(isinstance(text, str) for text in health["version"].values())
    assert health["models"]["completion"]["local"]["model_id"] == "book"
    setting = server.client.get("/v1beta/server_setting", headers=AGENT)
    assert (setting.status_code, setting.json()) == (200, {"disable_client_side_telemetry": True})


def test_older_agents_post_to_health(server: Server) -> None:
    assert server.client.post("/v1/health", headers=AGENT).json() == server.client.get("/v1/health").json()


def test_chat_is_offered_if_the_model_supports_it() -> None:
    with running(FakeTokenizer) as server:
        health = server.client.get("/v1/health").json()
        assert (health.get("model"), health["chat_model"], set(health["models"])) == (None, "fake", {"chat"})


def test_the_agent_completes_and_reports_the_outcome(server: Server) -> None:
    body = {
        "language": "python",
        "segments": {
            "prefix": BOOK[:AT], "suffix": "\n" + BOOK[BEHIND:], "filepath": "src/mean.py",
            "git_url": "git@git.invalid:team/book.git",
            "declarations": [{"filepath": "file:///usr/lib/python3/numbers.py", "body": "class Number: ..."}],
            "relevant_snippets_from_changed_files": [{"filepath": "a.py", "body": "x = 1\n", "score": 0.91}],
            "relevant_snippets_from_recently_opened_files": [{"filepath": "b.py", "body": "y = 2\n", "score": 0.4}],
            "clipboard": "add(total, value)",
        },
        "user": "3f0b5c1e-5d4a-4a8e-9d56-2d5a6f1b7c11", "temperature": 0.1, "mode": "standard",
    }  # fmt: skip
    answer = post(server, COMPLETIONS, body).json()
    assert isinstance(answer["id"], str)
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [(0, LINE)]
    event = {"completion_id": answer["id"], "choice_index": 0, "view_id": f"view-{answer['id']}-at-1732200000000"}
    assert post(server, EVENTS, {"type": "view", **event}).text == ""
    select = {"type": "select", "select_kind": "line", **event, "elapsed": 1234}
    assert post(server, f"{EVENTS}?select_kind=line", select).text == ""
    assert post(server, EVENTS, {"type": "dismiss", **event, "elapsed": 1234}).text == ""


def test_while_the_model_loads_the_agent_retries() -> None:
    with running(wait=False) as server:
        assert server.client.get("/v1/health").status_code == 503
        assert server.client.get("/v1beta/server_setting").status_code == 200
