"""From a URL to a server that can be asked."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bench.serve.endpoint import Endpoint
from bench.serve.grpc_endpoint import GrpcEndpoint
from bench.serve.openai_endpoint import OpenAIEndpoint
from bench.serve.server_url import ServerUrl
from specdec.client import Client, Credentials
from specdec.client.generate_options import GenerateOptions
from specdec.types import SpeculationMode, SpeculationParams


async def connect(
    url: str, credentials: Credentials, *, model: str = "", temperature: float = 0.0, speculation: str = "auto"
) -> tuple[Endpoint, dict[str, Any]]:
    """The endpoint at ``url``, and facts about it for the report.

    url: as `ServerUrl.read` takes it.

    Raises:
        ConfigError: the URL means nothing.
        SpecdecError: the server does not answer.
    """
    asked = GenerateOptions(speculation=SpeculationParams(SpeculationMode(speculation)))
    # Servers that are not ours would refuse a field they do not know.
    extra = {} if speculation == "auto" else {"speculation": {"mode": speculation}}
    endpoint, facts = await connect_with(url, credentials, asked, extra, model=model, temperature=temperature)
    return endpoint, facts | {"url": url, "temperature": temperature, "speculation": speculation}


async def connect_with(
    url: str,
    credentials: Credentials,
    asked: GenerateOptions,
    extra: Mapping[str, Any],
    *,
    model: str = "",
    temperature: float = 0.0,
    tell_ids: bool = False,
) -> tuple[Endpoint, dict[str, Any]]:
    """The same, with further options for every request: ``asked`` where the server speaks gRPC, ``extra`` fields of the
    body where it speaks HTTP; ``tell_ids`` as `OpenAIEndpoint` has it. The facts are what the server says of itself;
    raises as `connect` does."""
    where = ServerUrl.read(url)
    if where.face == "grpc":
        if where.tls:
            credentials = dataclasses.replace(credentials, tls=True)
        async with Client(where.place, credentials) as client:
            info = await client.info(timeout_s=10.0)
        return (
            GrpcEndpoint(where.place, credentials, temperature=temperature, asked=asked),
            {"server": dataclasses.asdict(info)},
        )
    http = OpenAIEndpoint(
        where.place, key=credentials.key, model=model, temperature=temperature, tell_ids=tell_ids, extra=dict(extra)
    )
    try:
        return http, {"model": await http.find_model()}
    except BaseException:
        await http.close()
        raise
