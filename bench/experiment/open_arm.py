"""An arm that can be asked."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass

from bench.experiment.arm_request import ArmRequest
from bench.serve.ask import Ask
from bench.serve.connect import connect_with
from bench.serve.endpoint import Endpoint
from bench.serve.record import Record
from bench.serve.refused_error import RefusedError
from server.experiment.experiment_errors import ExperimentError
from specdec.client import Credentials
from specdec.errors import SpecdecError

_SERVER_FACTS = ("version", "target", "draft", "dtype", "kernels", "numeric_mode", "threads", "drafters", "max_batch")


@dataclass(frozen=True, slots=True)
class OpenArm:
    """``facts``: what its server says of itself."""

    name: str
    request: ArmRequest
    endpoint: Endpoint
    facts: dict[str, str]

    async def probe(self, ask: Ask) -> bool:
        """Ask something short, to see whether the server takes this arm's requests. True: it tells token ids.

        Raises:
            ExperimentError: it does not take them.
        """
        seen = Record(ask.name, 0.0)
        try:
            await self.endpoint.send(self.request.apply(ask), seen)
        except RefusedError as error:
            raise ExperimentError(f"arm {self.name!r}: the server is too busy: {error}; try again later") from None
        except SpecdecError as error:
            raise ExperimentError(f"arms.{self.name}: the server does not take this arm's requests: {error}") from None
        return bool(seen.token_hash)


@contextlib.asynccontextmanager
async def open_arm(
    name: str, request: ArmRequest, url: str, credentials: Credentials, *, model: str, temperature: float, source: str
) -> AsyncIterator[OpenArm]:
    """The arm at ``url``, which ``source`` gave; its connections end with the context.

    Raises:
        ExperimentError: the server does not answer, or the URL means nothing; names the source.
    """
    try:
        endpoint, found = await connect_with(
            url, credentials, request.options, request.fields, model=model, temperature=temperature, tell_ids=True
        )
    except SpecdecError as error:
        raise ExperimentError(f"{source} (arm {name!r}): {url}: {str(error).removeprefix('url: ')}") from None
    try:
        server = found.pop("server", {})
        facts = {key: str(value) for key, value in found.items()}
        facts |= {key: _words(server[key]) for key in _SERVER_FACTS if server.get(key) is not None}
        yield OpenArm(name, request, endpoint, facts)
    finally:
        await endpoint.close()


def _words(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
