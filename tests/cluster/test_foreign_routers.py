"""What vllm-router, smg and Envoy forward, drop and add, in front of a real server; equal to docs/scaling.md."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import uuid
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from specdec.config import KvEventsConfig
from tests.cluster.envoy_fleet import free_port, server
from tests.cluster.foreign_routers import MODEL_NAME, behind_envoy, routed, smg, vllm_router
from tests.cluster.wiretap import Wiretap, wiretap

ROUTERS = ("vllm-router 0.1.17", "smg 1.13.0", "Envoy 1.40.0")
VLLM, SMG, ENVOY = ROUTERS
SCALING = Path(__file__).parents[2] / "docs" / "scaling.md"

HI = [{"role": "user", "content": "hi"}]
STREAMED: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "hello", "max_tokens": 4},
    "/v1/chat/completions": {"messages": HI, "max_tokens": 4},
    "/v1/responses": {"input": "hi", "max_output_tokens": 4},
    "/v1/messages": {"messages": HI, "max_tokens": 4},
    "/v1/fim/completions": {"prompt": "a", "suffix": "b", "max_tokens": 4},
    "/completion": {"prompt": "hello", "n_predict": 4},
    "/infill": {"input_prefix": "a", "input_suffix": "b", "n_predict": 4},
    "/api/generate": {"prompt": "hello"},
    "/api/chat": {"messages": HI},
}
WHOLE: dict[str, dict[str, Any]] = {
    "/v1/messages/count_tokens": {"messages": HI},
    "/v1/completions/render": {"prompt": "hi"},
    "/tokenize": {"prompt": "hi"},
}
GETS = ("/v1/models", "/health", "/livez", "/metrics", "/version", "/v1/loads", "/api/tags")
SENT = {
    "authorization": "Bearer k", "x-api-key": "k", "x-request-id": "mine", "x-session-id": "an editor",
    "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "x-specdec-hold-headers": "1",
    "x-specdec-arm": "experiment=arm", "anthropic-version": "2023-06-01", "user-agent": "tester/1",
}  # fmt: skip
FIELDS: dict[str, Any] = {
    "cache_salt": "s", "session": "e", "speculation": {"mode": "auto"}, "supersedes_key": "k", "priority": 1,
    "top_k": 5, "min_p": 0.1, "seed": 1, "grammar": "root ::= [a-z]*", "return_token_ids": True, "whatever": [1],
}  # fmt: skip

ALL = {*STREAMED, *WHOLE, *GETS}
FORWARDED = {
    VLLM: ALL - {"/health"},
    SMG: {
        "/v1/completions", "/v1/chat/completions", "/v1/responses", "/v1/messages", "/v1/messages/count_tokens",
    },
    ENVOY: ALL,
}  # fmt: skip
OWN_ANSWER = {VLLM: {"/health"}, SMG: {"/v1/models", "/health"}, ENVOY: set[str]()}
_TYPED = {"/v1/completions", "/v1/chat/completions"}
# By router and path, the headers that do not arrive; of vllm-router it depends on the path.
DROPPED = {
    VLLM: {path: set(SENT) - {"traceparent"} if path not in _TYPED else set[str]() for path in (*STREAMED, *WHOLE)},
    SMG: {
        path: {"x-api-key", "x-session-id", "x-specdec-hold-headers", "x-specdec-arm", "user-agent"}
        for path in FORWARDED[SMG]
    },
    ENVOY: {path: set[str]() for path in (*STREAMED, *WHOLE)},
}


def bodies(path: str) -> list[dict[str, Any]]:
    body = {"model": MODEL_NAME, **STREAMED.get(path, {}), **WHOLE.get(path, {})}
    return [{**body, "stream": False}, {**body, "stream": True}] if path in STREAMED else [body]


def comparable(response: httpx.Response) -> str:
    """An answer without ids, times, cache figures and echoed request fields."""
    varying = r"id|item_id|request_id|created\w*|\w+_at|\w+_duration|\w+_ms|\w+_per_second|\w*cache\w*|prompt_n"
    again = r"temperature|store|priority"
    return re.sub(rf'"({varying}|{again})":("[^"]*"|[0-9.e-]+|true|false|null),?', "", response.text)


@asynccontextmanager
async def before_a_server(
    router: str, folder: Path
) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient, Wiretap]]:
    """A client of the router, one of the server behind it, and the requests that the router sends."""
    async with server() as one, wiretap(one.http_port) as tap, AsyncExitStack() as stack:
        if router == ENVOY:
            client = await stack.enter_async_context(behind_envoy(tap, folder))
        else:
            command = vllm_router() if router == VLLM else smg()
            client = await stack.enter_async_context(routed(command, [tap.port], folder))
        url = f"http://127.0.0.1:{one.http_port}"
        yield client, await stack.enter_async_context(httpx.AsyncClient(base_url=url, trust_env=False)), tap


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
async def test_what_a_router_forwards(router: str, tmp_path: Path) -> None:
    forwarded, own, dropped = set[str](), set[str](), dict[str, set[str]]()
    async with before_a_server(router, tmp_path) as (client, direct, tap):
        for path in (*STREAMED, *WHOLE):
            for body in bodies(path):
                tap.seen.clear()
                answer, plain = await client.post(path, json=body, headers=SENT), await direct.post(path, json=body)
                seen = tap.last(path)
                if seen is None:
                    assert answer.status_code == 404
                    continue
                assert answer.status_code == plain.status_code == 200, answer.text
                assert comparable(answer) == comparable(plain), (path, body)
                assert answer.headers["content-type"] == plain.headers["content-type"]
                forwarded.add(path)
                dropped.setdefault(path, set()).update(
                    name for name, value in SENT.items() if seen.headers.get(name) != value
                )
        for path in GETS:
            tap.seen.clear()
            answer = await client.get(path)
            if answer.status_code == 200:
                (forwarded if tap.last(path) is not None else own).add(path)
    assert forwarded - OWN_ANSWER[router] == FORWARDED[router]
    assert {path for path in own if path in GETS} <= OWN_ANSWER[router]
    assert dropped == DROPPED[router]


@pytest.mark.slow
@pytest.mark.parametrize("router", ROUTERS)
async def test_specdec_fields_are_forwarded(router: str, tmp_path: Path) -> None:
    async with before_a_server(router, tmp_path) as (client, _, tap):
        for path in sorted(FORWARDED[router] & set(STREAMED)):
            if (router, path) == (SMG, "/v1/responses"):
                refused = await client.post(path, json=bodies(path)[0] | FIELDS)
                assert refused.status_code == 400  # it forwards OpenAI's fields only
                continue
            for name, value in FIELDS.items():
                tap.seen.clear()
                body = bodies(path)[0] | {name: value}
                answer = await client.post(path, json=body)
                assert answer.status_code in (200, 400, 422), answer.text
                seen = tap.last(path)
                assert seen is not None
                assert {field: seen.body.get(field) for field in body} == body


def test_the_document_lists_the_results() -> None:
    text = SCALING.read_text(encoding="utf-8")
    for path in (*STREAMED, *WHOLE, *GETS):
        cells = [
            "forwarded" if path in FORWARDED[router] else "its own answer" if path in OWN_ANSWER[router] else "no"
            for router in ROUTERS
        ]
        assert f"| `{path}` | {' | '.join(cells)} |" in text
    for name in SENT:
        cells = ["arrives" if name not in DROPPED[router]["/v1/completions"] else "no" for router in ROUTERS]
        elsewhere = "arrives" if name not in DROPPED[VLLM]["/completion"] else "no"
        assert f"| `{name}` | {cells[0]} | {elsewhere} | {cells[1]} | {cells[2]} |" in text
    assert all(router in text for router in ROUTERS)


@pytest.mark.slow
async def test_vllm_router_follows_kv_events(tmp_path: Path) -> None:
    """Its kv_aware policy sends a prompt to the server that has its beginning, by the events alone."""
    async with AsyncExitStack() as stack:
        events = [
            KvEventsConfig(
                endpoint=f"tcp://127.0.0.1:{free_port()}", replay_endpoint=f"tcp://127.0.0.1:{free_port()}"
            )
            for _ in range(2)
        ]  # fmt: skip
        servers = [await stack.enter_async_context(server(kv_events=each)) for each in events]
        taps = [await stack.enter_async_context(wiretap(each.http_port)) for each in servers]
        more = ["--kv-event-block-size", "64", "--kv-event-model", MODEL_NAME]
        for tap, each in zip(taps, events, strict=True):
            url = f"http://127.0.0.1:{tap.port}"
            more += ["--kv-event-source", f"{url}={each.endpoint}"]
            more += ["--kv-event-replay-source", f"{url}={each.replay_endpoint}"]
        client = await stack.enter_async_context(
            routed(vllm_router("kv_aware", *more), [tap.port for tap in taps], tmp_path)
        )
        direct = await stack.enter_async_context(httpx.AsyncClient(trust_env=False))
        for number in range(8):
            which = number % 2
            url = f"http://127.0.0.1:{servers[which].http_port}/v1/completions"
            assert await _follows(client, direct, url, taps, which), f"text {number}"


async def _follows(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, url: str, taps: list[Wiretap], which: int
) -> bool:
    """Whether a new text that was computed at ``url`` goes there afterwards. A prompt that goes elsewhere is cached
    there too, so each attempt, with more time for the events, uses another text."""
    for pause_s in (0.05, 0.2, 0.5, 1.0):
        prompt = f"{uuid.uuid4()} " * 10
        assert (await direct.post(url, json={"prompt": prompt, "max_tokens": 1})).status_code == 200
        await asyncio.sleep(pause_s)
        if all([await _goes_to(client, taps, which, prompt) for _ in range(3)]):
            return True
    return False


async def _goes_to(client: httpx.AsyncClient, taps: list[Wiretap], which: int, prompt: str) -> bool:
    """Whether a prompt with this beginning goes there."""
    for tap in taps:
        tap.seen.clear()
    body = {"model": MODEL_NAME, "prompt": prompt + "!", "max_tokens": 1}
    assert (await client.post("/v1/completions", json=body)).status_code == 200
    return taps[which].last("/v1/completions") is not None


@pytest.mark.slow
@pytest.mark.parametrize("router", [VLLM, SMG])
async def test_a_router_retries_a_call_without_a_first_byte(router: str, tmp_path: Path) -> None:
    """The engine of a stream dies before the first token: with held headers, the client notices nothing."""
    async with AsyncExitStack() as stack:
        target = "scripted:1500:0:4096"
        servers = [await stack.enter_async_context(server(target, hold_headers=True)) for _ in range(2)]
        taps = [await stack.enter_async_context(wiretap(each.http_port)) for each in servers]
        command = vllm_router("round_robin") if router == VLLM else smg("round_robin")
        client = await stack.enter_async_context(routed(command, [tap.port for tap in taps], tmp_path))
        for tap in taps:
            tap.seen.clear()
        body = {"model": MODEL_NAME, "prompt": "hello", "max_tokens": 8, "stream": True}
        asking = asyncio.create_task(client.post("/v1/completions", json=body))
        async with asyncio.timeout(10):
            while not any(tap.last("/v1/completions") for tap in taps):
                await asyncio.sleep(0.02)
        await asyncio.sleep(0.2)  # until its engine has it
        (which,) = [number for number, tap in enumerate(taps) if tap.last("/v1/completions")]
        (engine,) = servers[which].frontend.children()
        os.kill(engine.pid, signal.SIGKILL)
        answer = await asking
        tries = sum(len([seen for seen in tap.seen if seen.path == "/v1/completions"]) for tap in taps)
        plain = await client.post("/v1/completions", json=body)
    assert answer.status_code == 200
    assert comparable(answer) == comparable(plain)
    assert tries >= 2
