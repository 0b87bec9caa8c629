"""An answer lists the ignored fields that would change its meaning; other fields are ignored silently."""

from __future__ import annotations

from typing import Any

import pytest

from server.http.app import ENDPOINTS
from server.http.fields import _MEANING, ignored_fields
from server.request_fields import MAX_UNKNOWN
from tests.server.http.calls import Fim
from tests.server.http.harness import Server, running
from tests.server.http.ollama.lines import lines

HI = [{"role": "user", "content": "hi"}]
ASKS: list[tuple[str, dict[str, Any]]] = [
    ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
    ("/v1/chat/completions", {"messages": HI, "max_tokens": 2}),
    ("/v1/fim/completions", {"prompt": "a", "max_tokens": 2}),
    ("/completion", {"prompt": "a", "n_predict": 2, "id_slot": 3}),
    ("/api/generate", {"prompt": "a", "stream": False}),
    ("/api/chat", {"messages": HI, "stream": False}),
    ("/v1/messages", {"messages": HI, "max_tokens": 2}),
    ("/v1/responses", {"input": "a", "max_output_tokens": 2}),
]


@pytest.mark.parametrize(("path", "body"), ASKS)
def test_an_answer_lists_ignored_fields(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = server.ask(path, **body, use_beam_search=True, lora=[{"id": 0}], user="u", mirostat=0, typical_p=1.0)
    assert [note["param"] for note in answer["warnings"]] == ["use_beam_search", "lora"]
    assert all(note["message"] for note in answer["warnings"])
    harmless = {"user": "u", "store": True, "metadata": {}, "keep_alive": "5m", "cache_prompt": True, "whatever": [1]}
    neutral = {"mirostat": 0, "typical_p": 1, "xtc_probability": 0.0, "tfs_z": 1.0, "lora": [], "use_beam_search": 0}
    assert "warnings" not in server.ask(path, **body, **harmless, **neutral, length_penalty=1.0)


def test_an_effort_that_the_model_does_not_know_is_reported(server: Server) -> None:
    def warned(path: str, **fields: Any) -> list[str]:
        answer = server.ask(path, **dict(ASKS)[path], **fields)
        return [note["param"] for note in answer.get("warnings", ())]

    assert warned("/v1/chat/completions", reasoning={"effort": "low"}) == ["reasoning"]  # a field of Responses
    assert warned("/v1/responses", reasoning={"effort": "low"}) == ["reasoning.effort"]
    assert warned("/v1/chat/completions", reasoning_effort="low") == ["reasoning_effort"]
    assert not warned("/v1/chat/completions", reasoning_effort="none")
    assert not warned("/v1/responses", reasoning={"effort": None, "summary": None})
    assert warned("/v1/messages", output_config={"effort": "low"}) == ["output_config.effort"]
    assert not warned("/v1/messages", output_config={"effort": "high"})


def test_a_summary_or_files_that_the_server_should_keep_are_reported(server: Server) -> None:
    answer = server.ask("/v1/messages", **dict(ASKS)["/v1/messages"], compaction={"type": "summarize"}, container="c")
    assert [note["param"] for note in answer["warnings"]] == ["compaction", "container"]


def test_streams_list_ignored_fields(server: Server) -> None:
    for path, body in ASKS[:4]:
        events = [event for event in server.stream(path, **body, xtc_probability=0.5) if event != "[DONE]"]
        assert [note["param"] for note in events[-1]["warnings"]] == ["xtc_probability"]
    *_, last = lines(server, prompt="a", options={"mirostat": 2, "num_ctx": 100, "use_mmap": True})
    assert [note["param"] for note in last["warnings"]] == ["options.mirostat"]


def test_fields_that_an_answer_cannot_show_are_reported(server: Server) -> None:
    shown = {"echo": True, "logprobs": 2, "return_token_ids": True, "return_step_trees": True}
    answer = server.ask("/v1/fim/completions", prompt="a", max_tokens=2, **shown)
    assert [note["param"] for note in answer["warnings"]] == [*shown]
    answer = server.ask("/v1/messages", messages=HI, max_tokens=2, logprobs=True)
    assert [note["param"] for note in answer["warnings"]] == ["logprobs"]


def test_fields_that_a_dialect_reads_cause_no_warning(server: Server) -> None:
    grammar = 'root ::= "a"'
    response = server.ask("/v1/completions", prompt="a", max_tokens=2, grammar=grammar, n=2, echo=True)
    assert [note["param"] for note in response["warnings"]] == ["grammar"]
    response = server.ask("/completion", prompt="a", n_predict=2, grammar=grammar, max_tokens=5)
    assert [note["param"] for note in response["warnings"]] == ["max_tokens"]


def test_every_listed_field_is_ignored_by_some_dialect() -> None:
    read = [{field.name for field in endpoint.fields} for endpoint in ENDPOINTS if endpoint.fields]
    assert not [name for name in _MEANING if all(name in fields for fields in read)]
    assert [*ignored_fields({"lora": 1}, ())] == [("lora", "is not served here")]


MISSPELT = {"temprature": 0.5, "streem": False, "topP": 0.9, "seeds": 1}
LIKELY = ["temperature", "stream", "top_p", "seed"]


@pytest.mark.parametrize(("path", "body"), [ask for ask in ASKS if not ask[0].startswith("/api")])
def test_misspelt_fields_are_reported_with_the_likely_name(server: Server, path: str, body: dict[str, Any]) -> None:
    answer = server.ask(path, **body, **MISSPELT)
    assert [note["param"] for note in answer["warnings"]] == [*MISSPELT]
    assert [note["message"] for note in answer["warnings"]] == [
        f"is not known (did you mean {name}?), and was ignored" for name in LIKELY
    ]


def test_misspelt_fields_of_inner_objects_are_reported_up_to_a_limit(server: Server) -> None:
    answer = server.ask("/api/generate", prompt="a", stream=False, options={"top_kk": 1})
    assert answer["warnings"] == [
        {"param": "options.top_kk", "message": "is not known (did you mean top_k?), and was ignored"}
    ]
    many = server.ask("/v1/completions", prompt="a", max_tokens=2, **{f"seed{i}": 1 for i in range(1000)})
    assert len(many["warnings"]) == MAX_UNKNOWN


def test_strict_fields_rejects_unread_fields() -> None:
    with running(fim=Fim(), strict_fields=True) as server:
        for path, body in ASKS:
            server.ask(path, **body, lora=[], user=None)  # these request nothing
            refused = server.client.post(path, json={**body, "temprature": 1, "whatever": [1], "use_beam_search": True})
            assert refused.status_code == 400, path
            assert "temprature: is not known (did you mean temperature?)" in refused.text or path.startswith("/api")
            assert all(
                part in refused.text for part in ("whatever", "is not known", "use_beam_search", "is not served")
            )
