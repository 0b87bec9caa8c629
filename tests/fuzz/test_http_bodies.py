"""Whatever is sent to an HTTP endpoint, the answer is an answer or a refusal, and nothing is left of it."""

from __future__ import annotations

from random import Random
from typing import Any

import httpx
import pytest

from server.http.app import ENDPOINTS, openapi_document
from tests.fuzz.fuzzed_server import FEW, FuzzedServer, fuzzed_server
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
    """What is wrong with the answer."""
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
