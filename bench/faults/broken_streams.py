"""Streams that an engine's death ends, and how each of them saw it."""

from __future__ import annotations

import asyncio
import json
from contextlib import aclosing

import grpc
import httpx

from specdec.client import CallError, Client
from specdec.types import Finished, StoppingParams

COMPLETE, UNAVAILABLE, CUT = "complete", "unavailable", "cut"
_CODE = "engine_unavailable"


async def over_grpc(client: Client, prompt: str, max_tokens: int) -> tuple[str, float]:
    """How a stream ended, and when, in the event loop's seconds."""
    ended = CUT
    stopping = StoppingParams(max_tokens=max_tokens, ignore_eos=True)
    try:
        async with aclosing(client.stream(prompt, stopping=stopping)) as events:
            async for event in events:
                if isinstance(event, Finished):
                    ended = COMPLETE
    except CallError as error:
        told = error.code == grpc.StatusCode.UNAVAILABLE and error.reached and error.retry_after_s is not None
        ended = UNAVAILABLE if told else f"{error.code.name}: {error.message}"
    return ended, asyncio.get_running_loop().time()


async def over_http(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> tuple[str, float]:
    """The same; over HTTP it is the stream's last event that tells."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "ignore_eos": True, "stream": True}
    try:
        async with http.stream("POST", "/v1/completions", json=body) as response:
            data = (await response.aread()).decode()
            ended = ending_of(response.status_code, data)
    except httpx.HTTPError as error:
        ended = f"{CUT}: {type(error).__name__}"
    return ended, asyncio.get_running_loop().time()


def ending_of(status: int, data: str) -> str:
    """How a stream of OpenAI's events ended, by all that came of it."""
    if status != 200:
        return UNAVAILABLE if status == 503 else f"status {status}"
    events = [line.removeprefix("data: ") for line in data.splitlines() if line.startswith("data: ")]
    for event in events:
        error = json.loads(event).get("error") if event != "[DONE]" else None
        if error is not None:
            return UNAVAILABLE if error["code"] == _CODE else f"error {error['code']}: {error['message']}"
    return COMPLETE if events and events[-1] == "[DONE]" else CUT
