"""Third-party routers in front of real servers with the scripted engine."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest

from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet, with_release, with_replica
from tests.cluster.envoy_fleet import MODEL, cluster_config, envoy_program, free_port, replica_of
from tests.cluster.wiretap import Wiretap

_ENVIRONMENT = Path(__file__).parents[2] / ".venv-cluster"
MODEL_NAME = "scripted"


def program(name: str) -> str:
    """The path of a router's program; skips the test if it is not installed."""
    for folder in (Path(sys.executable).parent, _ENVIRONMENT / "bin"):
        if (folder / name).exists():
            return str(folder / name)
    pytest.skip(f"needs {name}: make setup-cluster")


def vllm_router(policy: str = "consistent_hash", *more: str) -> Callable[[Sequence[str]], list[str]]:
    """The command, by URLs of servers."""
    return lambda urls: [program("vllm-router"), "--worker-urls", *urls, "--policy", policy, *more]


def smg(policy: str = "least_load") -> Callable[[Sequence[str]], list[str]]:
    """As `vllm_router`."""
    return lambda urls: [program("smg"), "launch", "--worker-urls", *urls, "--policy", policy]


async def until_served(client: httpx.AsyncClient) -> None:
    """Waits until a completion succeeds."""
    body = {"model": MODEL_NAME, "prompt": "x", "max_tokens": 1}
    async with asyncio.timeout(30):
        while True:
            try:
                if (await client.post("/v1/completions", json=body)).status_code == 200:
                    return
            except httpx.HTTPError:
                pass
            await asyncio.sleep(0.1)


@asynccontextmanager
async def routed(
    command: Callable[[Sequence[str]], list[str]], ports: Sequence[int], folder: Path
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the router that ``command`` starts in front of the servers at ``ports``."""
    port = free_port()
    words = command([f"http://127.0.0.1:{each}" for each in ports])
    words += ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    words += ["--worker-startup-check-interval", "1"]
    with (folder / "router.log").open("wb") as log, subprocess.Popen(words, stdout=log, stderr=log) as process:
        try:
            async with _client(port) as client:
                await until_served(client)
                yield client
        finally:
            process.kill()


@asynccontextmanager
async def behind_envoy(tap: Wiretap, folder: Path) -> AsyncIterator[httpx.AsyncClient]:
    """A client of Envoy in front of the server behind ``tap``."""
    config = cluster_config()

    class Place:
        http_port, grpc_port = tap.port, tap.port

    fleet = with_release(Fleet.of(config), MODEL, "blue")
    fleet = with_replica(fleet, replica_of("r0", "blue", Place()))  # type: ignore[arg-type]
    async with (
        EnvoyProcess(config, fleet, folder / "envoy", envoy_program()),
        _client(config.models[0].http_port) as client,
    ):
        await until_served(client)
        yield client


def _client(port: int) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", timeout=20, trust_env=False)
