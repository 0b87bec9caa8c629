"""Calls over HTTP, in several dialects: to their end, or left."""

from __future__ import annotations

import asyncio
import json

import httpx

from bench.soak.grpc_visits import LEFT, OK
from bench.soak.place import Place
from bench.soak.soak_fault import SoakFault
from bench.soak.wishes import some_body

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
NOT_SUPPORTED = 501


async def sse(place: Place) -> str:
    """A stream of OpenAI's, to its last word."""
    path, body, _ = _asked(place, stream=True)
    async with place.http.stream("POST", path, json=body) as response:
        data = (await response.aread()).decode()
    return _judged(response, data.endswith("data: [DONE]\n\n"))


async def sse_left(place: Place) -> str:
    """Gone after some pieces of the answer."""
    path, body, _ = _asked(place, stream=True)
    left = place.random.randrange(8)
    async with place.http.stream("POST", path, json=body) as response:
        async for _ in response.aiter_bytes():
            if left == 0:
                return LEFT
            left -= 1
    return _judged(response, True)


async def whole(place: Place) -> str:
    """In one piece."""
    path, body, samples = _asked(place, stream=False)
    response = await place.http.post(path, json=body)
    return _judged(response, response.status_code != 200 or len(response.json()["choices"]) == samples)


async def whole_left(place: Place) -> str:
    """Gone while it waits."""
    waiting = asyncio.create_task(whole(place))
    await asyncio.wait([waiting], timeout=place.random.choice((0.0, 0.01, 0.1, 0.8)))
    if waiting.done():
        return waiting.result()
    waiting.cancel()
    await asyncio.wait([waiting])
    return LEFT if waiting.cancelled() else waiting.result()


async def lines(place: Place) -> str:
    """Ollama's stream: a JSON object a line."""
    body = {"prompt": place.cut(), "raw": True, "options": {"num_predict": place.random.choice((4, 24))}}
    response = await place.http.post("/api/generate", json=await _named(place, body))
    if response.status_code != 200:
        return _judged(response, True)
    return _judged(response, bool(json.loads(response.text.splitlines()[-1]).get("done")))


async def infill(place: Place) -> str:
    """llama.cpp's gap."""
    text = place.cut()
    half = len(text) // 2
    body = {"input_prefix": text[:half], "input_suffix": text[half:], "n_predict": 16}
    return _judged(await place.http.post("/infill", json=body), True)


async def looks(place: Place) -> str:
    """What monitoring asks."""
    for path in ("/health", "/metrics", "/v1/models"):
        found = _judged(await place.http.get(path), True)
    return found


async def _named(place: Place, body: dict[str, object]) -> dict[str, object]:
    models = (await place.http.get("/v1/models")).json()["data"]
    return {"model": models[0]["id"], **body}


def _asked(place: Place, *, stream: bool) -> tuple[str, dict[str, object], int]:
    body, samples = some_body(place, stream=stream)
    if place.random.random() < 0.3:
        return CHAT, {"messages": [{"role": "user", "content": place.cut(300)}], **body}, samples
    return COMPLETIONS, {"prompt": place.cut(), **body}, samples


def _judged(response: httpx.Response, complete: bool) -> str:
    status = response.status_code
    if status == 200:
        if not complete:
            raise SoakFault(f"{response.request.url.path} ended in the middle")
        return OK
    if status >= 500 and status != NOT_SUPPORTED:
        raise SoakFault(f"{response.request.url.path}: status {status}")
    return f"refused {status}"
