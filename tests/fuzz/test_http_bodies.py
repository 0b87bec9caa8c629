"""Any body sent to an HTTP endpoint gets an answer or an error, and leaves no state."""

from __future__ import annotations

import json
from random import Random
from typing import Any

import httpx
import pytest

from server.http.app import ENDPOINTS, openapi_document
from tests.fuzz.fuzzed_server import FEW, FuzzedServer, assert_returned, fuzzed_server, settled_bytes
from tests.fuzz.livez_watch import livez_watch
from tests.fuzz.schema_fuzzer import SchemaFuzzer
from tests.fuzz.words import TEXTS

NOT_SUPPORTED = 501
_JSON = {"content-type": "application/json"}
_QUERIES = ("", "?", "?a", "?a=1&a=2", "?%ff=%00", "?" + "x" * 3000, "?limit=-1")


def operations() -> list[tuple[str, str, dict[str, Any]]]:
    """Method, path and schema of the body of every endpoint."""
    found = []
    for path, methods in openapi_document(ENDPOINTS)["paths"].items():
        for method, operation in methods.items():
            content = operation.get("requestBody", {}).get("content", {})
            schema = next(iter(content.values()))["schema"] if content else {}
            found.append((method.upper(), path, schema))
    return found


async def throw_bodies(fuzzed: FuzzedServer, count: int, seed: int) -> None:
    """``count`` bodies at each endpoint."""
    url = f"http://127.0.0.1:{fuzzed.server.http_port}"
    async with httpx.AsyncClient(base_url=url, timeout=120) as http:
        for method, path, schema in operations():

            async def one(number: int, method: str = method, path: str = path, schema: Any = schema) -> str | None:
                random = Random(f"{seed}/{method}/{path}/{number}")
                body = SchemaFuzzer(random).body(schema)
                target = path
                while "{" in target:
                    head, _, tail = target.partition("{")
                    target = head + httpx.URL("http://x/", params={"": random.choice(TEXTS)}).query.decode()[1:]
                    target += tail.partition("}")[2]
                target += random.choice(_QUERIES) if random.random() < 0.1 else ""
                return await _tried(http, method, target, body, f"seed {seed}, number {number}")

            await fuzzed.throw(count, one)


async def _tried(http: httpx.AsyncClient, method: str, target: str, body: bytes, which: str) -> str | None:
    """Return what is wrong with the answer."""
    try:
        response = await http.request(method, target, content=body, headers=_JSON)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        return f"{method} {target[:80]} ({which}): {type(error).__name__} {error}; body {body[:400]!r}"
    status = response.status_code
    broken = status >= 500 and status != NOT_SUPPORTED
    # Within a stream it is too late for a status.
    broken = broken or b'"code":"internal"' in response.content or b'"reason":"INTERNAL"' in response.content
    if broken:
        return f"{method} {target[:80]} ({which}): {status} {response.text[-300:]}; body {body[:400]!r}"
    return None


async def test_some_bodies_on_every_endpoint() -> None:
    async with fuzzed_server() as fuzzed:
        await throw_bodies(fuzzed, FEW, 0)
        await fuzzed.unharmed()


@pytest.mark.slow
@pytest.mark.timeout(7200)
async def test_many_bodies_on_every_endpoint(many: int, seed: int) -> None:
    async with fuzzed_server() as fuzzed:
        with livez_watch(fuzzed.server.http_port):
            await throw_bodies(fuzzed, many, seed)
        await fuzzed.unharmed()


def large_bodies() -> list[tuple[str, dict[str, Any]]]:
    """Bodies of large lists and texts, all of which are to be refused, with their endpoints."""
    text, ids = "a b " * (1 << 20), [7] * 200_000
    hi = [{"role": "user", "content": "hi"}]
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    tools = [{**tool, "function": {**tool["function"], "name": f"f{i}"}} for i in range(5_000)]
    return [
        *((path, {"prompt": value}) for path in ("/v1/completions", "/completion") for value in (text, ids)),
        ("/v1/completions", {"prompt": "a", "stop": ["x"] * 200_000}),
        ("/v1/completions", {"prompt": "a", "stop_token_ids": ids}),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1 for i in range(200_000)}}),
        ("/v1/completions", {"prompt": "a", "prediction": {"content": text}}),
        ("/v1/completions", {"prompt": "a", "speculation": {"drafters": ["x"] * 200_000}}),
        ("/v1/chat/completions", {"messages": [*hi] * 50_000}),
        ("/v1/chat/completions", {"messages": hi, "tools": tools, "tool_choice": "required"}),
        ("/v1/messages", {"messages": [*hi] * 50_000}),
        ("/v1/responses", {"input": [*hi] * 50_000}),
        ("/api/generate", {"prompt": "a", "context": ids}),
        ("/v1/completions", {"prompt": "a", "guided_choice": ["x"] * 200_000}),
    ]


@pytest.mark.slow
@pytest.mark.timeout(1800)
async def test_large_bodies_are_rejected_and_their_memory_is_freed() -> None:
    async with fuzzed_server() as fuzzed:
        settled = await settled_bytes(fuzzed.server)
        url = f"http://127.0.0.1:{fuzzed.server.http_port}"
        bodies = [(path, json.dumps(body).encode()) for path, body in large_bodies()]
        async with httpx.AsyncClient(base_url=url, timeout=120) as http:

            async def one(number: int) -> str | None:
                path, body = bodies[number % len(bodies)]
                status = (await http.post(path, content=body, headers=_JSON)).status_code
                return None if 400 <= status < 500 else f"{path}: {status}; body {body[:200]!r}"

            with livez_watch(fuzzed.server.http_port):
                await fuzzed.throw(3 * len(bodies), one)
        await fuzzed.unharmed()
        await assert_returned(fuzzed.server, settled)
