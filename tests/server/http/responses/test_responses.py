"""Answers of /v1/responses, field by field."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

from server.http.responses import parse_responses
from specdec.core.types import Delta, Finished, FinishReason, SpeculationStats, Started, Timings, Usage
from tests.fake_engine import DEFAULT_SEED
from tests.server.http.calls import make_call
from tests.server.http.harness import RESPOND, Server
from tests.server.http.test_completions import SPECULATIVE

ECHO = "user:hi;"
EXTRAS = {"seed": DEFAULT_SEED, "metrics": {"speculative_decoding": SPECULATIVE}}
TOOLS = [{"type": "function", "name": "look", "parameters": {"type": "object"}}]
SAID = 'Let me.\n<tool_call>{"name": "look", "arguments": {"at": 1}}</tool_call>'
CUT = {"status": "incomplete", "incomplete_details": {"reason": "max_output_tokens"}}
HEAD: dict[str, Any] = {
    "id": "resp_mine", "object": "response", "status": "in_progress", "background": False, "error": None,
    "incomplete_details": None, "model": "fake", "output": [], "previous_response_id": None,
    "reasoning": {"effort": None, "summary": None}, "store": False, "truncation": "disabled", "usage": None,
    "instructions": None, "max_output_tokens": 8, "metadata": {}, "parallel_tool_calls": True, "temperature": 1.0,
    "text": {"format": {"type": "text"}}, "tool_choice": "auto", "tools": [], "top_logprobs": 0, "top_p": 1.0,
    "user": None, "completed_at": None, "max_tool_calls": None, "prompt_cache_key": None, "safety_identifier": None,
    "service_tier": "default", "frequency_penalty": 0.0, "presence_penalty": 0.0,
}  # fmt: skip
USAGE = {
    "input_tokens": 8, "input_tokens_details": {"cached_tokens": 3, "cache_write_tokens": 0}, "output_tokens": 8,
    "output_tokens_details": {"reasoning_tokens": 0}, "total_tokens": 16,
}  # fmt: skip


def part(text: str, rows: Any = ()) -> dict[str, Any]:
    return {"type": "output_text", "annotations": [], "logprobs": list(rows), "text": text}


def message(status: str, *content: Any) -> dict[str, Any]:
    return {
        "id": "msg_mine_0", "type": "message", "status": status, "role": "assistant", "content": list(content),
    }  # fmt: skip


def dated(answer: dict[str, Any]) -> dict[str, Any]:
    """``answer`` without its time, which is looked at here."""
    assert abs(answer.pop("created_at") - time.time()) < 60
    return answer


def test_complete_response(server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 8, "store": True}
    answer = server.client.post(RESPOND, json=body, headers={"x-request-id": "mine"}).json()
    output = [message("incomplete", part(ECHO))]
    assert dated(answer) == {**HEAD, **CUT, "output": output, "usage": USAGE, **EXTRAS}


def test_streamed_response(server: Server) -> None:
    server.client.headers["x-request-id"] = "mine"
    try:
        events = server.named_stream(RESPOND, input="hi", max_output_tokens=8)
    finally:
        del server.client.headers["x-request-id"]
    assert [event.pop("sequence_number") for event in events] == list(range(len(events)))
    for event in events:
        if "response" in event:
            dated(event["response"])
    at = {"item_id": "msg_mine_0", "output_index": 0, "content_index": 0}
    whole = message("incomplete", part(ECHO))
    assert events == [
        {"type": "response.created", "response": HEAD},
        {"type": "response.in_progress", "response": HEAD},
        {"type": "response.output_item.added", "output_index": 0, "item": message("in_progress")},
        {"type": "response.content_part.added", **at, "part": part("")},
        *({"type": "response.output_text.delta", **at, "delta": c, "logprobs": []} for c in ECHO),
        {"type": "response.output_text.done", **at, "text": ECHO, "logprobs": []},
        {"type": "response.content_part.done", **at, "part": part(ECHO)},
        {"type": "response.output_item.done", "output_index": 0, "item": whole},
        {"type": "response.incomplete", "response": {**HEAD, **CUT, "output": [whole], "usage": USAGE, **EXTRAS}},
    ]


def test_a_response_that_stops_by_itself_is_completed() -> None:
    def streamed(reason: FinishReason) -> list[dict[str, Any]]:
        async def write() -> bytes:
            call = make_call(b'{"input": "hi", "stream": true}')
            await call.read()
            stream = await parse_responses(call)
            end = Finished("", 0, reason, None, Usage(), SpeculationStats(), Timings())
            taken = [stream.take(event) for event in (Started("", 1, 8, 3, 0.5), Delta("", 0, [1], "a"), end)]
            return b"".join(taken) + stream.last()

        return [json.loads(line[6:]) for line in asyncio.run(write()).splitlines() if line.startswith(b"data: ")]

    *_, item, last = streamed(FinishReason.EOS)
    assert (last["type"], last["response"]["status"]) == ("response.completed", "completed")
    assert item["item"]["status"] == "completed"
    assert last["response"]["created_at"] <= last["response"]["completed_at"] < time.time() + 1
    *_, last = streamed(FinishReason.ABORTED)
    assert (last["type"], last["response"]["incomplete_details"]) == ("response.incomplete", {"reason": "abort"})


def test_echoed_request_fields(server: Server) -> None:
    body = {"input": "hi", "metadata": {"a": "b"}, "user": "u", "instructions": "be", "max_output_tokens": 0}
    answer = server.ask(RESPOND, **body)
    assert {name: answer[name] for name in body if name != "input"} == {k: v for k, v in body.items() if k != "input"}
    assert answer["output"] == []


def test_tool_calls_are_output_items(server: Server) -> None:
    body = {"input": SAID, "tools": TOOLS}
    text, call, rest = server.ask(RESPOND, **body)["output"]
    assert (text["content"], rest["content"]) == ([part("[look]user:Let me.")], [part(";")])
    assert call["id"].startswith("fc_")
    assert call.pop("call_id").startswith("call_")
    assert call.pop("arguments").replace(" ", "") == '{"at":1}'
    del call["id"]
    assert call == {"type": "function_call", "status": "completed", "name": "look"}
    events = server.named_stream(RESPOND, **body)
    of_call = [event for event in events if event.get("output_index") == 1]
    kinds = [event["type"].removeprefix("response.") for event in of_call]
    assert (kinds[0], kinds[-2:]) == (
        "output_item.added", ["function_call_arguments.done", "output_item.done"],
    )  # fmt: skip
    assert set(kinds[1:-2]) == {"function_call_arguments.delta"}
    done, item = of_call[-2], of_call[-1]["item"]
    assert "".join(event["delta"] for event in of_call[1:-2]) == done["arguments"] == item["arguments"]
    assert of_call[0]["item"] == {**item, "status": "in_progress", "arguments": ""}
    assert [event["output_index"] for event in events if event["type"] == "response.output_item.done"] == [0, 1, 2]
    assert [item["type"] for item in events[-1]["response"]["output"]] == ["message", "function_call", "message"]


def test_a_complete_call_at_the_end_of_a_cut_answer_is_completed(server: Server) -> None:
    limit = len(f"[look]user:{SAID}")
    whole = server.ask(RESPOND, input=SAID, tools=TOOLS, max_output_tokens=limit)
    *_, last = server.named_stream(RESPOND, input=SAID, tools=TOOLS, max_output_tokens=limit)
    for answer in (whole, last["response"]):
        assert answer["status"] == "incomplete"
        assert [item["status"] for item in answer["output"]] == ["completed", "completed"]


def test_server_side_tools_are_rejected(server: Server) -> None:
    answer = server.ask(RESPOND, input="hi", tools=[*TOOLS, {"type": "web_search"}])
    assert answer["output"][0]["content"] == [part(f"[look]{ECHO}")]
    assert [note["param"] for note in answer["warnings"]] == ["tools[1]"]


def test_a_conversation_that_may_be_truncated_is_answered(server: Server) -> None:
    answer = server.ask(RESPOND, input="hi", truncation="auto")
    assert answer["output"][0]["content"] == [part(ECHO)]
    assert (answer["truncation"], [note["param"] for note in answer["warnings"]]) == ("disabled", ["truncation"])


def test_logprobs(server: Server) -> None:
    def token(text: str, logprob: float) -> dict[str, Any]:
        return {"token": text, "logprob": logprob, "bytes": list(text.encode())}

    rows = [{**token(c, -0.5), "top_logprobs": [token(c, -0.5), token("\x01", -1.25)]} for c in ECHO]
    body = {"input": "hi", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    assert server.ask(RESPOND, **body)["output"][0]["content"] == [part(ECHO, rows)]
    events = server.named_stream(RESPOND, **body)
    deltas = [event["logprobs"] for event in events if event["type"] == "response.output_text.delta"]
    assert deltas == [[row] for row in rows]
    assert events[-1]["response"]["output"][0]["content"] == [part(ECHO, rows)]


def test_errors(server: Server) -> None:
    for body, status, code in (
        ({"model": "other"}, 404, "model_not_found"), ({"cache_salt": "full"}, 429, "queue_full"),
        ({"input": "x" * 200}, 400, "context_length_exceeded"), ({"cache_salt": "bug"}, 500, "internal"),
    ):  # fmt: skip
        found, error = server.refused(RESPOND, **{"input": "hi"} | body)
        assert (found, error["code"]) == (status, code)
    assert server.refused(RESPOND, input="x" * 200)[1]["param"] == "input"
    for field, value in (("previous_response_id", "resp_1"), ("conversation", "conv_1"), ("prompt", {"id": "pmpt_1"})):
        assert server.refused(RESPOND, input="hi", **{field: value})[1]["param"] == field


def test_a_broken_stream_ends_with_a_failed_event(server: Server) -> None:
    events = server.named_stream(RESPOND, input="hi", cache_salt="broken")
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["sequence_number"] == len(events) - 1
    failed = events[-1]["response"]
    assert (failed["status"], failed["error"]["code"]) == ("failed", "model_broken")


def test_embeddings_are_rejected(server: Server) -> None:
    status, error = server.refused("/v1/embeddings", model="fake", input="hi")
    assert (status, error["code"]) == (422, "embeddings_not_supported")
    assert "no embeddings" in error["message"]
