"""A whole server with keys, HTTP and gRPC, an operator, and an engine that records its requests."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from server.experiment.live.experiments import Experiments
from server.experiment.records import RECORD_FILES, Record, read_records
from server.serving import Serving
from specdec.api.v1 import completion_pb2_grpc, experiment_pb2_grpc, generation_pb2, generation_pb2_grpc
from specdec.config import Config, EngineConfig, ExperimentsConfig, ServerConfig
from tests.fake_engine import NOTING, noted
from tests.server.auth.key_files import make_key
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import quick_policy, unread_bytes

PLAN = """\
name: widths
arms:
  narrow: {request: {speculation: {width: 1}}}
  wide: {request: {speculation: {width: 2}, priority: 3}}
assignment: {mode: hash}
"""


@dataclass
class LiveServer:
    """``folder``: of the experiments. ``key``: an operator's; ``user_key``: another user's; ``code_key``: of a user
    limited to the index `code`; ``low_key``: of one limited to priority 2; ``address``: of gRPC."""

    serving: Serving
    folder: Path
    notes: Path
    key: str
    user_key: str
    code_key: str
    low_key: str
    channel: grpc.aio.Channel
    http: httpx.AsyncClient
    address: str

    def __post_init__(self) -> None:
        self.generation = generation_pb2_grpc.GenerationServiceStub(self.channel)
        self.completion = completion_pb2_grpc.CompletionServiceStub(self.channel)
        self.stub = experiment_pb2_grpc.ExperimentServiceStub(self.channel)

    @property
    def experiments(self) -> Experiments:
        return self.serving.models.first.experiments

    def metadata(self, key: str | None = None, **more: str) -> tuple[tuple[str, str], ...]:
        """Of a call with a key, the operator's unless another is given."""
        headers = {name.replace("_", "-"): value for name, value in more.items()}
        return (("authorization", f"Bearer {key or self.key}"), *headers.items())

    async def ask(self, text: str = "hello", arm: str = "", **body: Any) -> httpx.Response:
        """Request one completion over HTTP. The text contains its id, so that its arm is deterministic."""
        headers = {"x-request-id": text} | ({"x-specdec-arm": arm} if arm else {})
        return await self.http.post("/v1/completions", json={"prompt": text, "max_tokens": 4, **body}, headers=headers)

    async def stream(self, text: str = "hello", arm: str = "", **fields: Any) -> tuple[list[Any], dict[str, str]]:
        """The messages and trailers of one stream over gRPC."""
        request = generation_pb2.GenerateStreamRequest(text=text, request_id=text, **fields)
        request.stopping.max_tokens = 4
        more = {"x_specdec_arm": arm} if arm else {}
        call = self.generation.GenerateStream(request, metadata=self.metadata(**more))
        messages = [message async for message in call]
        return messages, {str(k): str(v) for k, v in await call.trailing_metadata()}

    def got(self) -> list[dict[str, Any]]:
        """Return the requests that the engine received."""
        return noted(self.notes)

    def records(self, name: str = "widths") -> list[Record]:
        """Return the records of an experiment so far."""
        return read_records(self.folder / name).records if RECORD_FILES.paths(self.folder / name) else []

    async def comes_to(self, condition: Callable[[], bool]) -> None:
        """Wait until ``condition`` holds."""
        async with asyncio.timeout(15):
            while not condition():
                await asyncio.sleep(0.01)

    async def recorded(self, count: int, name: str = "widths") -> list[Record]:
        """The records, once there are ``count``."""
        await self.comes_to(lambda: len(self.records(name)) >= count)
        return self.records(name)


def live_config(tmp_path: Path, draft: str | None = None, **experiments: Any) -> Config:
    """Both ports, keys, a folder for experiments."""
    notes = tmp_path / "notes"
    notes.mkdir(exist_ok=True)
    given: dict[str, Any] = {"folder": tmp_path / "experiments", **experiments}
    server = ServerConfig(
        grpc_port=0, http_port=0, keys_file=tmp_path / "keys.yaml", experiments=ExperimentsConfig(**given)
    )
    return Config(engine=EngineConfig(target="fake", draft=draft, cache_dir=notes), server=server)


@asynccontextmanager
async def live_server(tmp_path: Path, draft: str | None = None, **experiments: Any) -> AsyncIterator[LiveServer]:
    """A server with keys that serves; ``experiments``: values of `ExperimentsConfig`."""
    keys = tmp_path / "keys.yaml"
    keys.unlink(missing_ok=True)
    key, user = make_key(keys, "boss", "ops", admin=True), make_key(keys, "ada")
    code, low = make_key(keys, "bob", indexes=("code",)), make_key(keys, "cleo", max_priority=2)
    config = live_config(tmp_path, draft, **experiments)
    serving = Serving(config, lambda _: FakeTokenizer(), factory=NOTING, policy=quick_policy())
    addresses = await serving.start()
    try:
        await serving.wait_ready()
        url, address = f"http://127.0.0.1:{addresses.http_port}", f"127.0.0.1:{addresses.grpc_port}"
        headers = {"authorization": f"Bearer {key}"}
        async with (
            grpc.aio.insecure_channel(address) as channel,
            httpx.AsyncClient(base_url=url, headers=headers, timeout=20) as http,
        ):
            folder, notes = tmp_path / "experiments", config.engine.cache_dir
            server = LiveServer(serving, folder, notes, key, user, code, low, channel, http, address)
            yield server
            if serving.client.in_flight == 0:
                assert unread_bytes(serving.client) == 0
    finally:
        await serving.stop()
