"""Fields that routers add to a body change nothing: the answer is that of a plain body, without a warning."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.http.harness import Server

HI = [{"role": "user", "content": "hi"}]
COMPLETIONS = {"prompt": "hello", "max_tokens": 3, "seed": 1}
CHAT = {"messages": HI, "max_tokens": 3, "seed": 1}
# Fields that vllm-router 0.1.17 and smg 1.13.0 add to requests with their defaults, recorded from the wire.
VLLM_ROUTER: dict[str, Any] = {
    "echo": False, "no_stop_trim": False, "ignore_eos": False, "skip_special_tokens": True,
    "return_hidden_states": False, "continue_final_message": False, "separate_reasoning": True,
    "stream_reasoning": True, "include_reasoning": True,
    "logprobs": None,
}  # fmt: skip
SMG: dict[str, Any] = {
    "store": True, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0, "echo": False,
    "rid": "request-1", "routing_key": "key", "bootstrap_host": None, "bootstrap_port": None, "bootstrap_room": None,
    "data_parallel_rank": None, "lora_path": None, "session_params": None, "regex": None, "ebnf": None,
}  # fmt: skip
PRODUCTION_STACK: dict[str, Any] = {
    "request_id": "request-1", "kv_transfer_params": {"do_remote_decode": False, "do_remote_prefill": False},
    "add_special_tokens": True, "stream_options": None, "lora_request": None,
}  # fmt: skip
LLM_D: dict[str, Any] = {
    "kv_transfer_params": {
        "do_remote_decode": False, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
        "remote_host": None, "remote_port": None,
    },
    "cache_hit_threshold": 0.8, "request_id": "request-1", "vllm_xargs": {}, "mm_processor_kwargs": None,
    "ec_transfer_params": None,
}  # fmt: skip
ROUTERS = {"vllm-router": VLLM_ROUTER, "smg": SMG, "production-stack": PRODUCTION_STACK, "llm-d": LLM_D}
PATHS: dict[str, dict[str, Any]] = {"/v1/completions": COMPLETIONS, "/v1/chat/completions": CHAT}


def content_of(answer: dict[str, Any]) -> Any:
    return [choice.get("message", choice.get("text")) for choice in answer["choices"]], answer["usage"]["total_tokens"]


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("path", PATHS)
def test_fields_added_by_routers_change_nothing(server: Server, path: str, router: str) -> None:
    plain = server.ask(path, **PATHS[path])
    routed = server.ask(path, **PATHS[path], **ROUTERS[router])
    assert content_of(routed) == content_of(plain)
    assert "warnings" not in routed
    events = server.stream(path, **PATHS[path], **ROUTERS[router])
    assert events[-1] == "[DONE]"
    assert not any("error" in event or "warnings" in event for event in events[:-1])


def test_smg_rewrites_responses(server: Server) -> None:
    body = {"input": "hi", "max_output_tokens": 3}
    added = {"store": True, "temperature": 1.0, "priority": 0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
    answers = [server.ask("/v1/responses", **body, **more) for more in ({}, added)]
    assert answers[0]["output"][0]["content"] == answers[1]["output"][0]["content"]
    assert all("warnings" not in answer for answer in answers)
