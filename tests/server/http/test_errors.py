"""The status table: each condition's status, body and headers."""

from __future__ import annotations

import asyncio
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from server.errors import DeadlinePassedError, DrainingError, GenerationFailedError
from server.http.errors import Refusal, refusal_of
from server.http.openai_format import OPENAI_ERRORS, finish_fields
from specdec.core.types import Finished, FinishReason, SpeculationStats, Timings, Usage
from specdec.errors import FieldViolation, InvalidRequestError
from tests.fake_engine import FINGERPRINT
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.harness import CHAT, COMPLETIONS, MESSAGES, Server, running

HI = [{"role": "user", "content": "hi"}]


def parts(error: dict[str, Any]) -> tuple[str, str | None, str]:
    return error["type"], error["param"], error["code"]


def test_every_bad_field_is_named_together(server: Server) -> None:
    status, error = server.refused(prompt="a", n=99, temperature=-1, speculation={"width": 99}, stop=[5])
    assert (status, parts(error)) == (400, ("invalid_request_error", "n", "invalid_argument"))
    assert {e["param"] for e in error["errors"]} == {"n", "temperature", "speculation.width", "stop"}
    assert all(e["message"] in error["message"] for e in error["errors"])
    status, error = server.refused(CHAT, messages=[], top_p=7)
    assert {e["param"] for e in error["errors"]} == {"messages", "top_p"}


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"prompt":NaN}', b'{"prompt":"\\ud800"}', b"\xff"])
@pytest.mark.parametrize("path", [COMPLETIONS, CHAT])
def test_a_body_that_is_not_a_json_object_is_400(server: Server, path: str, data: bytes) -> None:
    response = server.client.post(path, content=data)
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "body"


TABLE = [
    ({"model": "other"}, 404, ("invalid_request_error", "model", "model_not_found")),
    ({"prompt": "x" * 200}, 400, ("invalid_request_error", "prompt", "context_length_exceeded")),
    ({"cache_salt": "long"}, 400, ("invalid_request_error", "prompt", "context_length_exceeded")),
    ({"cache_salt": "full"}, 429, ("rate_limit_error", None, "queue_full")),
    ({"cache_salt": "bug"}, 500, ("server_error", None, "internal")),
    ({"cache_salt": "broken", "max_tokens": 0}, 500, ("server_error", None, "model_broken")),
]


@pytest.mark.parametrize(("fields", "status", "wanted"), TABLE)
def test_status_of_each_error(
    server: Server, fields: dict[str, Any], status: int, wanted: tuple[str, str | None, str]
) -> None:
    found, error = server.refused(**({"prompt": "a"} | fields))
    assert (found, parts(error)) == (status, wanted)
    assert "secret" not in error["message"]


LONG = "x" * 200
LONG_CHAT = [{"role": "user", "content": LONG}]
OPENAI_LONG = (
    r"This model's maximum context length is 127 tokens, but the prompt has 2\d\d tokens.*; shorten the prompt"
)
LLAMA_LONG = r"the request exceeds the available context size: prompt has 2\d\d tokens.*; shorten the prompt"


@pytest.mark.parametrize(
    ("path", "fields", "wording"),
    [
        ("/v1/completions", {"prompt": LONG}, OPENAI_LONG),
        ("/v1/chat/completions", {"messages": LONG_CHAT}, OPENAI_LONG),
        ("/v1/responses", {"input": LONG}, OPENAI_LONG),
        ("/v1/messages", {"messages": LONG_CHAT}, r"prompt is too long: 2\d\d tokens > 127 maximum; shorten it"),
        ("/completion", {"prompt": LONG}, LLAMA_LONG),
        ("/api/chat", {"messages": LONG_CHAT}, LLAMA_LONG),
    ],
)
def test_a_too_long_prompt_is_refused_in_the_words_that_clients_search_for(
    server: Server, path: str, fields: dict[str, Any], wording: str
) -> None:
    response = server.client.post(path, json={**fields, "max_tokens": 2})
    assert response.status_code == 400
    error = response.json()["error"]
    assert re.fullmatch(wording, error if isinstance(error, str) else error["message"])
    if path == "/completion":
        assert (error["type"], error["n_ctx"]) == ("exceed_context_size_error", 128)
        assert f"{error['n_prompt_tokens']} tokens" in error["message"]


def test_a_compressed_body_is_refused_by_its_header(server: Server) -> None:
    for path, data in (
        ("/v1/chat/completions", b"\x1f\x8b"),
        ("/v1/messages", b"\x1f\x8b" * (1 << 19)),
        ("/api/chat", b"x"),
    ):
        response = server.client.post(path, content=data, headers={"content-encoding": "gzip"})
        assert response.status_code == 415
        assert "content-encoding: 'gzip' is not read here" in response.text
    plain = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"content-encoding": "Identity"})
    assert plain.status_code == 200


def test_a_too_long_chat_names_its_messages(server: Server) -> None:
    status, error = server.refused(CHAT, messages=[{"role": "user", "content": "x" * 200}])
    assert (status, parts(error)) == (400, ("invalid_request_error", "messages", "context_length_exceeded"))


def test_retry_after_is_a_header(server: Server) -> None:
    response = server.client.post(COMPLETIONS, json={"prompt": "a", "cache_salt": "full", "stream": True})
    assert response.status_code == 429  # a stream that has not started has its own status
    assert (response.headers["retry-after"], response.headers["retry-after-ms"]) == ("3", "2500")


def test_one_rejected_prompt_cancels_the_others(server: Server) -> None:
    status, _ = server.refused(prompt=["x" * 100, "y"], cache_salt="full")
    assert status == 429
    assert server.comes_to(lambda: server.serving.client.in_flight == 0)


def test_unknown_paths_and_methods(server: Server) -> None:
    response = server.client.get("/nothing")
    assert (response.status_code, response.json()["error"]["code"]) == (404, "path_not_found")
    for path, likely in (("/chat/completions", "/v1/chat/completions"), ("/v1/api/chat", "/api/chat"),
                         ("/v1/v1/messages", MESSAGES), ("/v1//messages", MESSAGES)):  # fmt: skip
        assert f"did you mean {likely}?" in str(server.client.post(path, json={}).json()["error"])
    for path in ("/openai/deployments/fake/chat/completions", "/v1", "/v1/"):
        assert "did you mean" not in server.client.post(path, json={}).json()["error"]["message"]
    for path in (COMPLETIONS, f"{COMPLETIONS}/"):
        response = server.client.get(path)
        assert (response.status_code, response.json()["error"]["code"]) == (405, "method_not_allowed")
        assert response.headers["allow"] == "POST"
    response = server.client.delete("/ping")  # each of its methods is an endpoint
    assert response.headers["allow"] == "GET, HEAD, POST"
    assert response.json()["error"]["message"] == "DELETE is not served here; use GET, HEAD, POST"
    assert server.client.get("/v1/models/").json()["object"] == "list"


def test_unknown_models(server: Server) -> None:
    (card,) = server.client.get("/v1/models").json()["data"]
    assert card.pop("created") > 0
    assert card == {
        "id": "fake", "object": "model", "owned_by": "specdec", "root": "fake", "parent": None, "max_model_len": 128,
        "numeric_fingerprint": FINGERPRINT,
        "meta": {"n_ctx_train": 128, "n_vocab": 256}, "type": "base", "max_context_length": 128, "aliases": [],
        "capabilities": {
            "completion_chat": True, "completion_fim": True, "function_calling": True, "fine_tuning": False,
            "vision": False, "classification": False,
        },
    }  # fmt: skip
    assert server.client.get("/v1/models/FAKE:latest").json()["id"] == "fake"
    for name in ("other", "a/fake"):
        response = server.client.get(f"/v1/models/{name}")
        assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")


def test_concurrent_calls_may_have_one_id(server: Server) -> None:
    slow = {"prompt": "x" * 100, "max_tokens": 100, "cache_salt": "slow", "stream": True}
    headers = {"x-request-id": "one"}
    with server.client.stream("POST", COMPLETIONS, json=slow, headers=headers) as response:
        lines = response.iter_lines()
        next(lines)
        twins = [server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers) for _ in range(2)]
        message = server.client.post(MESSAGES, json={"messages": HI}, headers=headers)
    assert [twin.status_code for twin in twins] == [200, 200], twins[0].text
    ids = {response.json()["id"].removeprefix("cmpl-") for response in (*twins, message)}
    assert len(ids) == 3
    assert "one" not in ids
    answers = [*twins, message]
    assert {each.headers["x-request-id"] for each in answers} == {message.headers["request-id"]} == {"one"}
    assert server.comes_to(lambda: not server.serving.client.in_flight)
    assert server.client.post(COMPLETIONS, json={"prompt": "a"}, headers=headers).json()["id"] == "cmpl-one"
    long = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "r" * 101})
    assert (long.status_code, long.json()["error"]["param"]) == (400, "x-request-id")


def test_a_call_of_several_prompts_shares_no_id_with_another(server: Server) -> None:
    body, headers = {"prompt": ["a", "b"], "cache_salt": "mute"}, {"x-request-id": "one"}
    with ThreadPoolExecutor(1) as pool:
        several = pool.submit(server.client.post, COMPLETIONS, json=body, headers=headers, timeout=1.0)
        assert server.comes_to(lambda: server.serving.client.in_flight == 2)
        other = server.client.post(COMPLETIONS, json={"prompt": "a"}, headers={"x-request-id": "one-0"})
        assert isinstance(several.exception(), httpx.ReadTimeout)
    assert (other.status_code, other.json().get("id")) == (200, "cmpl-one-0"), other.text


def test_an_error_after_the_first_byte_is_an_event_without_done(server: Server) -> None:
    *_, last = server.stream(prompt="a", cache_salt="broken")
    assert last["error"]["code"] == "model_broken"


def test_calls_are_503_while_the_model_loads() -> None:
    with running(wait=False) as server:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": HI})):
            response = server.client.post(path, json=body)
            # The tokenizer is loaded only by wait_ready, so this lasts however quick the engine is.
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "engine_unavailable"
            assert int(response.headers["retry-after"]) >= 1
        assert server.client.get("/readyz").status_code == 503
        assert server.client.get("/livez").status_code == 200


def test_a_drain_finishes_running_calls_and_rejects_new_ones() -> None:
    with running() as server:
        body = {"prompt": "x" * 60, "cache_salt": "slow", "stream": True, "max_tokens": 60}
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            stopping = asyncio.run_coroutine_threadsafe(server.serving.stop(20), server.loop)
            assert server.comes_to(lambda: httpx.get(f"{server.url}/readyz").status_code == 503)
            refused = httpx.post(f"{server.url}{COMPLETIONS}", json={"prompt": "a"})
            assert httpx.post(f"{server.url}{CHAT}", json={"messages": HI}).status_code == 503
            rest = [line for line in lines if line]
        stopping.result(20)
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "draining")
        assert "retry-after" in refused.headers
        assert refused.headers["connection"] == "close"
        assert rest[-1] == "data: [DONE]"


def test_a_drain_that_times_out_ends_streams_with_an_error() -> None:
    with running() as server:
        body = {"prompt": "x" * 100, "cache_salt": "slow", "stream": True, "max_tokens": 100}
        with server.client.stream("POST", COMPLETIONS, json=body) as response:
            lines = response.iter_lines()
            next(lines)
            server.run(server.serving.stop(0.2))
            assert "shut down" in [line for line in lines if line][-1]


def test_a_model_without_chat_or_fill_in_the_middle_is_an_error() -> None:
    with running(lambda: FakeTokenizer(has_chat=False)) as server:
        status, error = server.refused(CHAT, messages=HI)
        assert (status, parts(error)) == (422, ("not_supported_error", "messages", "chat_not_supported"))
        status, error = server.refused(prompt="a", suffix="b")
        assert (status, parts(error)) == (422, ("not_supported_error", "suffix", "fim_not_supported"))


def test_errors_found_by_the_engine_are_client_errors() -> None:
    for reason in ("GRAMMAR_TOO_COMPLEX", "NO_TOKEN_LEFT"):
        assert refusal_of(GenerationFailedError(reason, "why"), {}).status == 400
    assert refusal_of(GenerationFailedError("GRAMMAR_TOO_COMPLEX", ""), {"grammar": "guided_regex"}).field == (
        "guided_regex"
    )
    assert refusal_of(DeadlinePassedError(), {}).status == 408
    assert (b"connection", b"close") in refusal_of(DrainingError(), {}).headers


def test_error_messages_stay_short(caplog: pytest.LogCaptureFixture) -> None:
    violations = [FieldViolation(f"sampling.f{i}", "x" * 500) for i in range(500)]
    refusal = refusal_of(InvalidRequestError(violations), {})
    assert len(refusal.message) < 2010
    assert len(refusal.violations) == 32
    assert refusal.violations[0].field == "f0"
    assert refusal_of(ValueError("a secret"), {}) == Refusal(500, "INTERNAL", "internal error; see the server's log")
    assert "a secret" in caplog.text
    assert "errors" not in OPENAI_ERRORS.body(Refusal(500, "X", "y"))["error"]


def test_finish_reasons() -> None:
    def finish(reason: FinishReason, stop: str | int | None = None, tools: bool = False) -> tuple[str, Any]:
        fields = finish_fields(Finished("r", 0, reason, stop, Usage(), SpeculationStats(), Timings()), tools)
        return fields["finish_reason"], fields["stop_reason"]

    assert finish(FinishReason.EOS, 2) == ("stop", None)
    assert finish(FinishReason.STOP_TOKEN, 7) == ("stop", 7)
    assert finish(FinishReason.STOP_STRING, "a") == ("stop", "a")
    assert finish(FinishReason.LENGTH) == ("length", None)
    assert finish(FinishReason.ABORTED) == ("abort", None)
    assert finish(FinishReason.EOS, 2, tools=True) == ("tool_calls", None)
    assert finish(FinishReason.LENGTH, tools=True) == ("length", None)
