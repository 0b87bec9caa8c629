"""Clients for load tests: specdec over gRPC, any server with OpenAI's API over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import math
import re
import ssl
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any, Literal, NamedTuple

import grpc
import httpx

from server.body_budget import raise_descriptor_limit
from specdec.client.client import Client
from specdec.client.connection import CallError, Credentials, RetryPolicy
from specdec.client.prompt import CompletionHints, GenerateOptions
from specdec.config import ServerConfig
from specdec.core.types import Delta, Finished, RequestEvent, SamplingParams, Started
from specdec.errors import ConfigError, SpecdecError
from specdec.load.request import Endpoint, LoadRequest, Record, RefusedError

_GRPC_PORT: int = ServerConfig.model_fields["grpc_port"].default  # without it gRPC takes that of HTTPS


class ServerUrl(NamedTuple):
    """The address of a server."""

    protocol: Literal["grpc", "http"]
    place: str  # gRPC: host:port; HTTP: the base URL with the API version
    tls: bool

    @staticmethod
    def read(url: str) -> ServerUrl:
        """Parse ``grpc://host:port``, ``grpcs://host:port`` (TLS), ``http://...`` or ``https://...``. An HTTP URL
        without a path gets ``/v1``.

        Raises:
            ConfigError: the URL has none of these forms.
        """
        try:
            parts = httpx.URL(url)
            bare = parts.path in ("", "/")
            good = bool(parts.host) and not {"?", "#"} & set(url)  # a path is added to it
            good = good and (parts.port is None or 0 < parts.port < 1 << 16)
        except (httpx.InvalidURL, ValueError):  # the latter from names that are not in the DNS's alphabet
            raise ConfigError(f"url: {url!r} is not a URL; write grpc://HOST:PORT or http://HOST:PORT/v1") from None
        if good and bare and parts.scheme in ("grpc", "grpcs"):
            place = parts.netloc.decode() if parts.port else f"{parts.netloc.decode()}:{_GRPC_PORT}"
            return ServerUrl("grpc", place, parts.scheme == "grpcs")
        if good and parts.scheme in ("http", "https"):
            return ServerUrl("http", url.rstrip("/") + ("/v1" if bare else ""), parts.scheme == "https")
        raise ConfigError(f"url: {url!r} is neither grpc://HOST:PORT nor http://HOST:PORT/v1")


_BUSY_CODES = (grpc.StatusCode.RESOURCE_EXHAUSTED, grpc.StatusCode.UNAVAILABLE)
_HINTS = CompletionHints(mode="middle_or_prefix")


class GrpcEndpoint:
    """Sends GenerateStream for texts and conversations, Complete for gaps, without retries. Use in one event loop.

    asked: options of every request; fields of the `LoadRequest` take precedence.
    """

    def __init__(
        self,
        address: str,
        credentials: Credentials,
        *,
        temperature: float = 0.0,
        asked: GenerateOptions | None = None,
    ) -> None:
        self._client = Client(address, credentials, RetryPolicy(attempts=1, resumes=0))
        self._sampling, self._asked = SamplingParams(temperature=temperature), asked or GenerateOptions()

    async def send(self, ask: LoadRequest, record: Record) -> None:
        """As `Endpoint.send`."""
        try:
            async with aclosing(self._events(ask)) as events:
                await _note(events, record)
        except CallError as error:
            # A request that had started was not refused.
            if error.code in _BUSY_CODES and error.reached and record.queue_ms is None:
                raise RefusedError(str(error), error.retry_after_s) from None
            raise

    async def close(self) -> None:
        await self._client.close()

    def _events(self, ask: LoadRequest) -> AsyncGenerator[RequestEvent, None]:
        options: GenerateOptions = {
            **self._asked, "sampling": dataclasses.replace(ask.sampling or self._sampling, seed=ask.seed),
            "stopping": ask.stopping,
            "prediction": ask.prediction, "session": ask.session, "cache_salt": ask.salt,
        }  # fmt: skip
        if ask.model:
            options["model"] = ask.model
        if ask.gap is not None:
            return self._client.completion.complete(ask.gap, _HINTS, **options)
        return self._client.stream(ask.ids or ask.chat or ask.text, **options)


async def _note(events: AsyncGenerator[RequestEvent, None], record: Record) -> None:
    clock = asyncio.get_running_loop().time
    held = 0  # tokens whose text has not arrived yet
    record.token_ids = []
    async for event in events:
        if isinstance(event, Delta):
            held += len(event.token_ids)
            record.token_ids += event.token_ids
            if event.text:
                record.chunk(clock(), held)
                record.text += event.text
                held = 0
        elif isinstance(event, Started):
            record.queue_ms = event.queue_ms
        elif isinstance(event, Finished):
            record.prompt_tokens, record.cached_tokens = event.usage.prompt_tokens, event.usage.cached_tokens
            record.output_tokens = event.usage.output_tokens
            record.steps(event.stats.num_steps, event.stats.num_spec_steps, event.stats.acceptance_histogram)


_BUSY_STATUS = (429, 503)
_DATA = "data:"
_DONE: dict[str, Any] = {}  # the event that ends a stream
_SHOWN = 300
_FILTERS, _PLAIN = ("top_p", "top_k", "min_p"), SamplingParams()
_OPEN = ("specdec", "vllm")  # `owned_by` of servers that accept cache salts and return token ids


class EndpointError(SpecdecError):
    """The server returned an error or an invalid answer."""


class StatusError(EndpointError):
    """An HTTP status that is neither success nor a temporary refusal."""


class OpenAIEndpoint:
    """Streams ``/completions`` for texts and gaps (``suffix``), ``/chat/completions`` for conversations. Use in one
    event loop.

    base: URL with the version, ``http://host:port/v1``. model: empty until `find_model` finds the server's first.
    with_ids: request token ids from servers that return them. extra: further fields of every body. verify: of TLS, as
    httpx takes it.
    """

    def __init__(
        self,
        base: str,
        *,
        key: str = "",
        model: str = "",
        temperature: float = 0.0,
        with_ids: bool = False,
        extra: Mapping[str, Any] | None = None,
        verify: ssl.SSLContext | bool = True,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        self._base, self._model, self._temperature = base.rstrip("/"), model, temperature
        self._extra = dict(extra or {})
        self._open, self._with_ids = False, with_ids
        headers = {"authorization": f"Bearer {key}"} if key else {}
        # No limit: waiting for a free connection would count as the server's time.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(
            headers=headers, limits=limits, timeout=None, trust_env=False, verify=verify, transport=transport
        )

    async def find_model(self) -> str:
        """The requested model. Also detects whether the server accepts salts and returns token ids.

        Raises:
            EndpointError: no model was given, and the server does not answer, refuses the key or lists none.
        """
        models = f"{self._base}/models"
        try:
            answer = await self._http.get(models, timeout=10.0)
            answer.raise_for_status()
            card = answer.json()["data"][0]
            found, self._open = str(card["id"]), card.get("owned_by") in _OPEN
        except (httpx.HTTPError, ValueError, LookupError, TypeError, AttributeError) as error:
            if not self._model:
                raise EndpointError(f"{models} {_no_model(error)}") from None
        else:
            self._model = self._model or found
        return self._model

    async def send(self, ask: LoadRequest, record: Record) -> None:
        """As `Endpoint.send`."""
        path = "chat/completions" if ask.chat else "completions"
        clock = asyncio.get_running_loop().time
        try:
            async with self._http.stream("POST", f"{self._base}/{path}", json=self._body(ask)) as answer:
                if answer.status_code != 200:
                    raise _refusal(answer.status_code, answer.headers, await answer.aread())
                complete = False
                async with aclosing(_lines(answer)) as lines:
                    async for line in lines:
                        if (event := stream_event(line)) is not None:
                            complete = _take(event, record, clock()) or complete
        except httpx.HTTPError as error:
            raise EndpointError(f"{type(error).__name__}: {error}") from None
        if not complete:
            raise EndpointError("the stream ended before the answer: neither finish_reason nor [DONE] was sent")

    async def close(self) -> None:
        await self._http.aclose()

    def _body(self, ask: LoadRequest) -> dict[str, Any]:
        sampling = ask.sampling or SamplingParams(temperature=self._temperature)
        body: dict[str, Any] = {
            "max_tokens": ask.max_tokens, "temperature": sampling.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if model := ask.model or self._model:
            body["model"] = model
        # Only those that are set: not every server accepts all of them.
        body |= {name: getattr(sampling, name) for name in _FILTERS if getattr(sampling, name) != getattr(_PLAIN, name)}
        if ask.chat:
            body["messages"] = [{"role": turn.role, "content": turn.content} for turn in ask.chat]
        elif ask.gap is not None:
            body |= {"prompt": ask.gap.prefix, "suffix": ask.gap.suffix}
        else:
            body["prompt"] = list(ask.ids) if ask.ids else ask.text
        if ask.stop:
            body["stop"] = list(ask.stop)
        if ask.stop_ids:
            body["stop_token_ids"] = list(ask.stop_ids)  # accepted by specdec and vLLM
        if ask.fixed:
            body["ignore_eos"] = True  # accepted by specdec, vLLM, SGLang and llama.cpp
        if ask.prediction and isinstance(ask.prediction, str):
            body["prediction"] = {"type": "content", "content": ask.prediction}
        if ask.seed is not None:
            body["seed"] = ask.seed
        if self._open and ask.salt:
            body["cache_salt"] = ask.salt
        if self._open and self._with_ids:
            body["return_token_ids"] = True
        return body | self._extra


async def _lines(answer: httpx.Response) -> AsyncGenerator[str]:
    """The lines of an event stream. httpx also splits at U+2028 and others, which JSON may contain."""
    rest = b""
    async for data in answer.aiter_bytes():
        *lines, rest = re.split(rb"[\r\n]", rest + data)
        for line in lines:
            yield line.decode(errors="replace")
    yield rest.decode(errors="replace")


def stream_event(line: str) -> dict[str, Any] | None:
    """The object in a line of OpenAI's stream; None for a line without data. The last line is `_DONE`.

    Raises:
        EndpointError: the line reports an error, or is not a JSON object.
    """
    if not line.startswith(_DATA):
        return None
    data = line[len(_DATA) :].strip()
    if data == "[DONE]":
        return _DONE
    try:
        event = json.loads(data)
    except ValueError:
        raise EndpointError(f"the stream contains invalid JSON: {data[:_SHOWN]}") from None
    if not isinstance(event, dict):
        raise EndpointError(f"the stream contains a value that is not an object: {data[:_SHOWN]}")
    if event.get("error"):
        raise EndpointError(str(event["error"])[:_SHOWN])
    return event


def _take(event: dict[str, Any], record: Record, now_s: float) -> bool:
    """Record an event of the stream. Returns whether it ends the answer."""
    if event is _DONE:
        return True
    new = ends = False
    try:
        for choice in event.get("choices") or []:
            ends = ends or bool(choice.get("finish_reason"))
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning") or ""  # some servers send it as both
            text = choice.get("text") or thought + (delta.get("content") or "")
            if text:
                record.text += text
                new = True
            if (ids := choice.get("token_ids")) is not None:
                record.token_ids = record.token_ids or []
                record.token_ids += ids
        if usage := event.get("usage"):
            record.prompt_tokens = int(usage.get("prompt_tokens") or 0)
            record.output_tokens = int(usage.get("completion_tokens") or 0)
            record.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        if figures := (event.get("metrics") or {}).get("speculative_decoding"):
            all_steps, drafted = figures.get("num_steps", 0), figures.get("num_spec_steps", 0)
            record.steps(all_steps, drafted, figures.get("acceptance_histogram", ()))
    except (AttributeError, TypeError, ValueError):
        raise EndpointError(f"the stream contains an invalid completion: {str(event)[:_SHOWN]}") from None
    record.last_s = now_s
    if new:
        record.chunk(now_s)
    return ends


def _no_model(error: Exception) -> str:
    """What prevented a list of models, and the remedy."""
    if isinstance(error, httpx.HTTPStatusError):
        status = error.response.status_code
        if status in (401, 403):
            return f"refuses the key (HTTP {status}); give one with --key-file"
        return f"answers with HTTP {status}; check the URL, or give a model with --model"
    if isinstance(error, httpx.HTTPError):
        untrusted = "CERTIFICATE_VERIFY_FAILED" in str(error)
        remedy = "give its authority's file (--ca)" if untrusted else "check the URL, and that the server runs"
        return f"does not answer ({type(error).__name__}: {error}); {remedy}"
    return "names no model; give one with --model"


def _refusal(status: int, headers: httpx.Headers, body: bytes) -> SpecdecError:
    message = f"HTTP {status}: {body.decode('utf-8', 'replace')[:_SHOWN]}"
    if status not in _BUSY_STATUS:
        return StatusError(message)
    try:
        hint = float(headers.get("retry-after", ""))
    except ValueError:  # it may be a date
        hint = math.nan
    return RefusedError(message, max(0.0, hint) if math.isfinite(hint) else None)


async def connect(
    url: str,
    credentials: Credentials,
    asked: GenerateOptions | None = None,
    extra: Mapping[str, Any] | None = None,
    *,
    model: str = "",
    temperature: float = 0.0,
    with_ids: bool = False,
) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint at ``url``, as `ServerUrl.read` takes it, and the server's description.

    asked: options of every request over gRPC. extra: further fields of every body over HTTP. model: empty: the first
    that the server lists. with_ids: as in `OpenAIEndpoint`.

    Raises:
        ConfigError: the URL is invalid, a file of the credentials cannot be read, or TLS is asked of an http:// URL.
        SpecdecError: the server does not answer.
    """
    where = ServerUrl.read(url)
    if where.protocol == "grpc":
        if where.tls:
            credentials = dataclasses.replace(credentials, tls=True)
        async with Client(where.place, credentials) as client:
            info = await client.info(timeout_s=10.0, model=model)
        asked = {**(asked or {}), "model": model}
        endpoint = GrpcEndpoint(where.place, credentials, temperature=temperature, asked=asked)
        return endpoint, {"server": dataclasses.asdict(info)}
    if credentials.tls and not where.tls:
        option = "--ca" if credentials.ca else "--cert" if credentials.cert else "--tls"
        raise ConfigError(f"{option}: an http:// URL is not encrypted; write https://, or leave {option} out")
    raise_descriptor_limit()  # each request in flight has a connection of its own
    http = OpenAIEndpoint(
        where.place, key=credentials.key, model=model, temperature=temperature, with_ids=with_ids, extra=extra,
        verify=_tls_of(credentials) if where.tls else True,
    )  # fmt: skip
    try:
        return http, {"model": await http.find_model()}
    except BaseException:
        await http.close()
        raise


def _tls_of(credentials: Credentials) -> ssl.SSLContext:
    """How httpx checks a server, and which certificate it shows to one. Raises ConfigError: a file cannot be used."""
    credentials.channel()  # names a file that cannot be read, which OpenSSL does not
    ca, cert, key = (
        None if path is None else path.expanduser() for path in (credentials.ca, credentials.cert, credentials.cert_key)
    )
    try:
        context = httpx.create_ssl_context(trust_env=False) if ca is None else ssl.create_default_context(cafile=ca)
        if cert is not None:
            context.load_cert_chain(cert, key, password=lambda: b"")  # instead of a prompt on the terminal
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"credentials: ca, cert and cert_key must be PEM files, the key not encrypted and that of cert ({error})"
        ) from None
    return context
