"""`make attack`: latency of two streams and of `/livez`, and memory, while one caller attacks a real server."""

from __future__ import annotations

import asyncio
import os
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import grpc
import httpx
import pytest

from bench.local_server import LocalServer
from specdec.api.v1 import generation_pb2
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.attack.attacks import ATTACKS, MIB, Target
from tests.attack.bystanders import Figures, Observations, observing
from tests.models.tiny import make_tiny_model
from tests.server.auth.key_files import make_key
from tests.soak.watch import memory_bytes

pytestmark = [pytest.mark.slow, pytest.mark.model]

CACHE = Path("~/.cache/specdec").expanduser()
GAP_P99_MS, GAP_MAX_MS, LIVEZ_P99_MS = 100.0, 250.0, 50.0
MEMORY_BYTES = 64 * MIB
BUSY = 2.0  # on a busy machine a figure may be as many times the undisturbed one, if that is more than the limit
UNDISTURBED_S = 10.0
REST_S, POLL_S = 15.0, 3.0
SETTLE_S = 1.0  # after an attack, not counted as undisturbed
RESTART_S = 120.0


def problems(name: str, found: Figures, undisturbed: Figures) -> list[str]:
    """The figures beyond their limits."""
    limits = {
        "gap_p99": max(GAP_P99_MS, BUSY * undisturbed.gap_p99),
        "gap_max": max(GAP_MAX_MS, BUSY * undisturbed.gap_max),
        "livez_p99": max(LIVEZ_P99_MS, BUSY * undisturbed.livez_p99),
    }
    return [
        f"{name}: {figure} {getattr(found, figure):.0f} ms, limit {limit:.0f} ms"
        for figure, limit in limits.items()
        if getattr(found, figure) > limit
    ]


def row(name: str, found: Figures, memory: dict[str, int]) -> str:
    grown = "  ".join(f"{part} {count / MIB:+6.0f} MiB" for part, count in memory.items())
    return (
        f"{name:<24} gaps p50 {found.gap_p50:5.0f}  p99 {found.gap_p99:6.0f}  max {found.gap_max:6.0f} ms"
        f"  /livez p99 {found.livez_p99:6.0f} ms  {grown}"
    )


async def growth(server: LocalServer, before: dict[str, int]) -> dict[str, int]:
    """Bytes that the processes keep, once these are within the limit or `REST_S` have passed."""
    until_s = time.monotonic() + REST_S
    while True:
        await asyncio.sleep(POLL_S)
        after = memory_bytes(server)
        grown = {part: after[part] - before[part] for part in after}
        if max(grown.values()) <= MEMORY_BYTES or time.monotonic() > until_s:
            return grown


@contextmanager
def low_priority() -> Iterator[None]:
    """An attacker on another machine would not take the server's processor."""
    os.setpriority(os.PRIO_PROCESS, 0, 19)
    try:
        yield
    finally:
        with suppress(PermissionError):
            os.setpriority(os.PRIO_PROCESS, 0, 0)


@pytest.mark.timeout(900)
async def test_attacks_affect_no_other_client(tmp_path: Path) -> None:
    engine = EngineConfig(
        target="smollm2-135m", threads=1, max_batch=16, max_context=2048, kv_tokens=64 * 512,
        prefix_cache=False,  # its pages are touched one after the other, which looks like growth
        speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    keys = tmp_path / "keys.yaml"
    key = make_key(keys, "operator", admin=True)
    server_config = ServerConfig(grpc_port=0, http_port=0, log_calls=False, keys_file=keys)
    config = Config(engine=engine, server=server_config)
    spans: dict[str, tuple[float, float]] = {}
    memory: dict[str, dict[str, int]] = {}
    found: list[str] = []
    async with LocalServer(config) as server:
        target = Target(server.grpc_port, server.http_port, key, tmp_path)
        observed: Observations
        with observing(server.grpc_port, server.http_port, key) as observed:
            began_s = time.monotonic()
            await asyncio.sleep(UNDISTURBED_S)
            rests = [(began_s, time.monotonic())]
            at_rest = memory_bytes(server)
            for name, attack in ATTACKS.items():
                began_s = time.monotonic()
                try:
                    with low_priority():
                        await attack(target)
                except AssertionError as error:
                    found.append(f"{name}: {error}")
                spans[name] = began_s, time.monotonic()
                memory[name] = await growth(server, at_rest)
                rests.append((spans[name][1] + SETTLE_S, time.monotonic()))
    undisturbed = observed.during(*rests)
    print(row("undisturbed", undisturbed, dict.fromkeys(at_rest, 0)))
    for name, span in spans.items():
        each = observed.during(span)
        print(row(name, each, memory[name]))
        found += problems(name, each, undisturbed)
        kept = {part: count for part, count in memory[name].items() if count > MEMORY_BYTES}
        found += [f"{name}: the {part} keeps {count / MIB:.0f} MiB" for part, count in kept.items()]
    assert not found, "\n".join(found)


@pytest.mark.timeout(300)
async def test_an_engine_that_dies_without_free_descriptors_is_restarted() -> None:
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=64 * 64, max_batch=16, max_context=192,
        speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0, log_calls=False))
    async with LocalServer(config) as server:
        frontend = server.frontend
        resource.prlimit(frontend.pid, resource.RLIMIT_NOFILE, (256, 256))
        opened = [await asyncio.open_connection("127.0.0.1", server.http_port) for _ in range(400)]
        server.engine.kill()
        until_s = time.monotonic() + RESTART_S
        served = False
        while not served:
            assert frontend.is_running()
            assert time.monotonic() < until_s, "the engine was not restarted"
            async with grpc.aio.insecure_channel(server.grpc_address) as channel:
                call = channel.unary_unary(
                    "/specdec.api.v1.GenerationService/Generate",
                    request_serializer=generation_pb2.GenerateRequest.SerializeToString,
                )
                try:
                    await call(generation_pb2.GenerateRequest(text="a", stopping={"max_tokens": 1}), timeout=5)
                    served = True
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.5)
        for _, writer in opened:
            writer.close()
    assert served


@pytest.mark.timeout(300)
async def test_a_template_that_folds_a_huge_constant_takes_no_memory(tmp_path: Path) -> None:
    folder = make_tiny_model("llama", tmp_path / "model")
    (folder / "chat_template.jinja").write_text("{{ 'a' * 20000000000 }}")
    engine = EngineConfig(
        target=str(folder), threads=1, cache_dir=CACHE, kv_tokens=64 * 20, max_batch=4, max_context=448,
        speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0, log_calls=False))
    async with LocalServer(config) as server:
        before = memory_bytes(server)
        with observing(server.grpc_port, server.http_port) as observed:
            began_s = time.monotonic()
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=60) as http:
                body = {"messages": [{"role": "user", "content": "a"}]}
                response = await http.post("/v1/chat/completions", json=body)
            ended_s = time.monotonic()
        grown = await growth(server, before)
    print(row("template", observed.during((began_s, ended_s)), grown))
    assert 400 <= response.status_code < 500
    assert max(grown.values()) <= MEMORY_BYTES
    assert observed.during((began_s, ended_s)).livez_p99 <= LIVEZ_P99_MS * BUSY
