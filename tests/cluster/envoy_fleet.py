"""Scripted servers in their own processes behind a real Envoy."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.local_server import LocalServer
from cluster.config import ClusterConfig
from cluster.envoy import EnvoyFiles, fleet_files
from cluster.envoy_process import EnvoyError, EnvoyProcess, find_envoy
from cluster.fleet import Fleet, Replica, ReplicaState, with_release, with_replica, without_replica
from cluster.state_folder import replace_files
from specdec.config import Config, EngineConfig, ServerConfig
from tests.fake_engine import SCRIPTED

MODEL = "coder"


def envoy_program() -> Path:
    """Envoy's program; skips the test if it is not installed."""
    try:
        return find_envoy()
    except EnvoyError as error:
        pytest.skip(str(error))


def free_port() -> int:
    """A free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cluster_config(**settings: Any) -> ClusterConfig:
    """One model on free ports."""
    model = {"name": MODEL, "http_port": free_port(), "grpc_port": free_port(), **settings.pop("model", {})}
    listen = {"admin_port": 0, **settings.pop("listen", {})}
    return ClusterConfig.model_validate({"models": [model], "listen": listen, **settings})


def server(target: str = "scripted:0:0:4096", **settings: Any) -> LocalServer:
    """A server with the scripted engine, not started."""
    config = Config(
        engine=EngineConfig(target=target),
        server=ServerConfig(grpc_port=0, http_port=0, log_calls=False, drain_s=5.0, **settings),
    )
    return LocalServer(config, factory=SCRIPTED, tokenizer="tests.server.fake_tokenizer:ScriptedTokenizer")


@dataclass
class EnvoyFleet:
    """``servers`` by replica id. Everything stops at the end of the ``async with`` block."""

    config: ClusterConfig
    envoy: EnvoyProcess
    fleet: Fleet
    servers: dict[str, LocalServer]
    _stack: AsyncExitStack = field(default_factory=AsyncExitStack)

    @property
    def http(self) -> str:
        """URL of Envoy's HTTP listener."""
        return f"http://127.0.0.1:{self.config.models[0].http_port}"

    @property
    def grpc(self) -> str:
        """Address of Envoy's gRPC listener."""
        return f"127.0.0.1:{self.config.models[0].grpc_port}"

    def direct(self, replica_id: str) -> str:
        """URL of a replica's own HTTP port."""
        return f"http://127.0.0.1:{self.servers[replica_id].http_port}"

    def route(self, fleet: Fleet) -> None:
        """Routes by ``fleet``."""
        self.fleet = fleet
        route(self.envoy, fleet)

    async def add(self, replica_id: str, release: str = "blue", **settings: Any) -> None:
        """Adds a replica and waits until it gets calls."""
        self.servers[replica_id] = await self._stack.enter_async_context(server(**settings))
        self.route(with_replica(self.fleet, replica_of(replica_id, release, self.servers[replica_id])))
        await self.envoy.admin.wait_routable("127.0.0.1", self.servers[replica_id].http_port, 10)

    async def end(self, replica_id: str) -> None:
        """Ends a replica's server, which finishes its running calls."""
        await self.servers.pop(replica_id).__aexit__()

    async def loads(self) -> dict[str, dict[str, Any]]:
        """Answers of /v1/loads, by replica."""
        async with httpx.AsyncClient(trust_env=False) as client:
            answers = await asyncio.gather(*(client.get(f"{self.direct(name)}/v1/loads") for name in self.servers))
        return {name: answer.json() for name, answer in zip(self.servers, answers, strict=True)}


def write_fleet(config: ClusterConfig, fleet: Fleet, files: EnvoyFiles) -> list[Path]:
    """Writes the watched files; returns those that changed."""
    return replace_files(fleet_files(config, fleet, files))


def route(envoy: EnvoyProcess, fleet: Fleet) -> None:
    """Routes by ``fleet`` from now on, as the reconciler does; running calls continue."""
    write_fleet(envoy._config, fleet, envoy._files)


def replica_of(replica_id: str, release: str, of: LocalServer, fingerprint: str = "") -> Replica:
    """A server as a ready replica."""
    fingerprint = fingerprint or f"numbers-of-{release}"
    return Replica(replica_id, MODEL, release, "127.0.0.1", of.http_port, of.grpc_port, fingerprint, ReplicaState.READY)


@asynccontextmanager
async def envoy_fleet(
    folder: Path, releases: Sequence[str] = ("blue", "blue"), target: str = "scripted:0:0:4096", **settings: Any
) -> AsyncIterator[EnvoyFleet]:
    """A server for each of ``releases``, called r0, r1 and so on, behind Envoy; sessions go to the first release."""
    program = envoy_program()
    config = cluster_config(**settings)
    fleet = Fleet.of(config)
    async with AsyncExitStack() as stack:
        servers = {f"r{i}": server(target) for i in range(len(releases))}
        await asyncio.gather(*(stack.enter_async_context(each) for each in servers.values()))
        for (name, each), release in zip(servers.items(), releases, strict=True):
            fleet = with_replica(with_release(fleet, MODEL, release), replica_of(name, release, each))
        envoy = await stack.enter_async_context(EnvoyProcess(config, fleet, folder / "envoy", program))
        yield EnvoyFleet(config, envoy, fleet, servers, stack)


def without(fleet: Fleet, *replica_ids: str) -> Fleet:
    """``fleet`` without these replicas."""
    for replica_id in replica_ids:
        fleet = without_replica(fleet, replica_id)
    return fleet
