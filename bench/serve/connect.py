"""From a URL to a server that can be asked."""

from __future__ import annotations

import dataclasses
from typing import Any
from urllib.parse import urlsplit

from bench.serve.endpoint import Endpoint
from bench.serve.grpc_endpoint import GrpcEndpoint
from bench.serve.openai_endpoint import OpenAIEndpoint
from specdec.client import Client, Credentials
from specdec.errors import ConfigError
from specdec.types import SpeculationMode


async def connect(
    url: str, credentials: Credentials, *, model: str = "", temperature: float = 0.0, speculation: str = "auto"
) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint at ``url``, and facts about it for the report.

    url: ``grpc://host:port``, ``grpcs://host:port`` (TLS), or ``http://host:port/v1`` and ``https://``.

    Raises:
        ConfigError: the URL is of none of these forms.
        SpecdecError: the server does not answer.
    """
    parts = urlsplit(url)
    facts: dict[str, Any] = {"url": url, "temperature": temperature}
    if parts.scheme in ("grpc", "grpcs") and parts.netloc and parts.path in ("", "/"):
        if parts.scheme == "grpcs":
            credentials = dataclasses.replace(credentials, tls=True)
        async with Client(parts.netloc, credentials) as client:
            info = await client.info(timeout_s=10.0)
        facts |= {"speculation": speculation, "server": dataclasses.asdict(info)}
        mode = SpeculationMode(speculation)
        return GrpcEndpoint(parts.netloc, credentials, temperature=temperature, speculation=mode), facts
    if parts.scheme in ("http", "https") and parts.netloc:
        # Servers that are not ours would refuse a field they do not know.
        extra = {} if speculation == "auto" else {"speculation": {"mode": speculation}}
        endpoint = OpenAIEndpoint(url, key=credentials.key, model=model, temperature=temperature, extra=extra)
        return endpoint, facts | {"speculation": speculation, "model": await endpoint.find_model()}
    raise ConfigError(f"url: {url!r} is neither grpc://HOST:PORT nor http://HOST:PORT/v1")
