"""Any server with OpenAI's API, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from bench.serve.ask import Ask
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from specdec.errors import SpecdecError

_BUSY = (429, 503)
_DATA = "data:"
_SHOWN = 300


class EndpointError(SpecdecError):
    """The server's answer is an error, or none at all."""


class OpenAIEndpoint:
    """Streams ``/completions`` for texts and gaps (``suffix``), ``/chat/completions`` for conversations.

    base: with the version, ``http://host:port/v1``. model "": the first that the server names. extra: fields of every
    body. Use in one event loop.
    """

    def __init__(
        self,
        base: str,
        *,
        key: str = "",
        model: str = "",
        temperature: float = 0.0,
        extra: dict[str, Any] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base, self._model, self._temperature, self._extra = base.rstrip("/"), model, temperature, extra or {}
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Waiting for a free connection of ours would look like waiting for the server.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=None, trust_env=False, transport=transport
        )

    async def find_model(self) -> str:
        """The model that is asked for.

        Raises:
            EndpointError: the server can not be reached, or names none.
        """
        if not self._model:
            try:
                answer = await self._http.get(f"{self._base}/models", timeout=10.0)
                answer.raise_for_status()
                self._model = str(answer.json()["data"][0]["id"])
            except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
                raise EndpointError(f"{self._base}/models names no model ({error}); give one with --model") from None
        return self._model

    async def send(self, ask: Ask, record: Record) -> None:
        """As `Endpoint.send`."""
        path = "chat/completions" if ask.chat else "completions"
        clock = asyncio.get_running_loop().time
        try:
            async with self._http.stream("POST", f"{self._base}/{path}", json=self._body(ask)) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.headers, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA):
                        _take(line[len(_DATA) :].strip(), record, clock())
        except httpx.HTTPError as error:
            raise EndpointError(f"{type(error).__name__}: {error}") from None

    async def close(self) -> None:
        """As `Endpoint.close`."""
        await self._http.aclose()

    def _body(self, ask: Ask) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model, "max_tokens": ask.max_tokens, "temperature": self._temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if ask.chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in ask.chat]
        elif ask.gap is not None:
            body |= {"prompt": ask.gap.prefix, "suffix": ask.gap.suffix}
        else:
            body["prompt"] = ask.text
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.fixed:
            body["ignore_eos"] = True  # not OpenAI's, but ours, vLLM's, SGLang's and llama.cpp's
        if ask.prediction:
            body["prediction"] = {"type": "content", "content": ask.prediction}
        return body | self._extra


def _take(data: str, record: Record, now_s: float) -> None:
    if data == "[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        raise EndpointError(f"the stream holds something else than JSON: {data[:_SHOWN]}") from None
    if event.get("error"):
        raise EndpointError(str(event["error"])[:_SHOWN])
    choices = event.get("choices") or []
    if any(choice.get("text") or (choice.get("delta") or {}).get("content") for choice in choices):
        record.chunk(now_s)
    if usage := event.get("usage"):
        record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0


def _refusal(status: int, headers: httpx.Headers, body: bytes) -> SpecdecError:
    message = f"HTTP {status}: {body.decode('utf-8', 'replace')[:_SHOWN]}"
    if status not in _BUSY:
        return EndpointError(message)
    try:
        hint: float | None = float(headers.get("retry-after", ""))
    except ValueError:
        hint = None
    return RefusedError(message, hint)
