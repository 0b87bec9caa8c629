"""Any server with OpenAI's API, over HTTP."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from bench.serve.ask import Ask
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from bench.serve.said import Said
from specdec.errors import SpecdecError
from specdec.types import SamplingParams

_BUSY = (429, 503)
_DATA = "data:"
_SHOWN = 300
_FILTERS, _PLAIN = ("top_p", "top_k", "min_p"), SamplingParams()
_OPEN = ("specdec", "vllm")  # as they name themselves: servers that know cache salts, and tell token ids


class EndpointError(SpecdecError):
    """The server's answer is an error, or none at all."""


class OpenAIEndpoint:
    """Streams ``/completions`` for texts and gaps (``suffix``), ``/chat/completions`` for conversations.

    base: with the version, ``http://host:port/v1``. model "": the first that the server names. tell_ids: ask a server
    that can tell them for token ids. extra: fields of every body. Use in one event loop.
    """

    def __init__(
        self,
        base: str,
        *,
        key: str = "",
        model: str = "",
        temperature: float = 0.0,
        tell_ids: bool = False,
        extra: dict[str, Any] | None = None,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base, self._model, self._temperature, self._extra = base.rstrip("/"), model, temperature, extra or {}
        self._open, self._tell_ids = False, tell_ids
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # Waiting for a free connection of ours would look like waiting for the server.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=None, trust_env=False, transport=transport
        )

    async def find_model(self) -> str:
        """The model that is asked for. Also finds out whether the server takes salts and tells token ids.

        Raises:
            EndpointError: none was given, and the server can not be reached, or names none.
        """
        try:
            answer = await self._http.get(f"{self._base}/models", timeout=10.0)
            answer.raise_for_status()
            card = answer.json()["data"][0]
            found, self._open = str(card["id"]), card.get("owned_by") in _OPEN
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            if not self._model:
                raise EndpointError(f"{self._base}/models names no model ({error}); give one with --model") from None
        else:
            self._model = self._model or found
        return self._model

    async def send(self, ask: Ask, record: Record) -> None:
        """As `Endpoint.send`."""
        path = "chat/completions" if ask.chat else "completions"
        clock = asyncio.get_running_loop().time
        said = Said()
        try:
            async with self._http.stream("POST", f"{self._base}/{path}", json=self._body(ask)) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.headers, await answer.aread())
                async for line in answer.aiter_lines():
                    if line.startswith(_DATA):
                        _take(line[len(_DATA) :].strip(), record, said, clock())
        except httpx.HTTPError as error:
            raise EndpointError(f"{type(error).__name__}: {error}") from None
        said.note(record)

    async def close(self) -> None:
        """As `Endpoint.close`."""
        await self._http.aclose()

    def _body(self, ask: Ask) -> dict[str, Any]:
        sampling = ask.sampling or SamplingParams(temperature=self._temperature)
        body: dict[str, Any] = {
            "model": self._model, "max_tokens": ask.max_tokens, "temperature": sampling.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        # Not every server knows all of them.
        body |= {name: getattr(sampling, name) for name in _FILTERS if getattr(sampling, name) != getattr(_PLAIN, name)}
        if ask.chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in ask.chat]
        elif ask.gap is not None:
            body |= {"prompt": ask.gap.prefix, "suffix": ask.gap.suffix}
        else:
            body["prompt"] = list(ask.ids) if ask.ids else ask.text
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.fixed:
            body["ignore_eos"] = True  # not OpenAI's, but ours, vLLM's, SGLang's and llama.cpp's
        if ask.prediction:
            body["prediction"] = {"type": "content", "content": ask.prediction}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if self._open and ask.salt:
            body["cache_salt"] = ask.salt
        if self._open and self._tell_ids:
            body["return_token_ids"] = True
        return body | self._extra


def _take(data: str, record: Record, said: Said, now_s: float) -> None:
    if data == "[DONE]":
        return
    try:
        event = json.loads(data)
    except ValueError:
        raise EndpointError(f"the stream holds something else than JSON: {data[:_SHOWN]}") from None
    if event.get("error"):
        raise EndpointError(str(event["error"])[:_SHOWN])
    new = False
    for choice in event.get("choices") or []:
        text = choice.get("text") or (choice.get("delta") or {}).get("content")
        if text:
            said.text(text)
            new = True
        if choice.get("token_ids") is not None:
            said.ids(choice["token_ids"])
    if new:
        record.chunk(now_s)
    if usage := event.get("usage"):
        record.prompt_tokens, record.output_tokens = usage.get("prompt_tokens", 0), usage.get("completion_tokens", 0)
        record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    if figures := (event.get("metrics") or {}).get("speculative_decoding"):
        all_steps, drafted = figures.get("num_steps", 0), figures.get("num_spec_steps", 0)
        record.steps(all_steps, drafted, figures.get("acceptance_histogram", ()))


def _refusal(status: int, headers: httpx.Headers, body: bytes) -> SpecdecError:
    message = f"HTTP {status}: {body.decode('utf-8', 'replace')[:_SHOWN]}"
    if status not in _BUSY:
        return EndpointError(message)
    try:
        hint: float | None = float(headers.get("retry-after", ""))
    except ValueError:
        hint = None
    return RefusedError(message, hint)
