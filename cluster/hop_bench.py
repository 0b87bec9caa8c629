"""What Envoy adds to a call: ``python -m cluster.hop_bench``.

A scripted server writes into every message when it left the engine; streams ask it by turns directly and through
Envoy, so that both meet the same machine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.figures import spread
from bench.frontend.frontend_bench import FACTORY, TOKENIZER, GrpcReader, HttpReader
from bench.frontend.paced_engine import TOKENS, now_ns, paced_target, read_stamps
from bench.local_server import LocalServer
from cluster.config import ClusterConfig
from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet, Replica, ReplicaState, with_replica
from specdec.config import Config, EngineConfig, ServerConfig

_MODEL, _RELEASE, _HERE = "paced", "blue", "127.0.0.1"
_PROMPT = "def add(first, second):"


@dataclass(frozen=True, slots=True)
class HopPlan:
    """``streams`` at a time, each of ``calls`` calls by turns directly and through Envoy, of ``messages`` messages."""

    streams: int = 16
    calls: int = 30
    messages: int = 12
    step_ms: float = 40.0


@dataclass(slots=True)
class _Way:
    """Milliseconds: from a call to its first message without the engine's part, and from the engine to the reader."""

    first_ms: list[float] = field(default_factory=list)
    message_ms: list[float] = field(default_factory=list)

    def take(self, sent_ns: int, messages: Sequence[tuple[int, str]]) -> None:
        """One call's messages: when each was read, and its text."""
        for number, (at_ns, text) in enumerate(messages):
            stamps = read_stamps(text)
            if number == 0:
                self.first_ms.append((at_ns - sent_ns - (stamps[1] - stamps[0])) / 1e6)
            else:
                self.message_ms.append((at_ns - stamps[-1]) / 1e6)


Reader = HttpReader | GrpcReader


async def measure_hop(plan: HopPlan, folder: Path) -> dict[str, Any]:
    """JSON-able figures by protocol: each way's, and what Envoy adds to the first message at p50 and p99 and to each
    further message in the mean.

    Raises:
        EnvoyError: Envoy is not installed or does not start.
    """
    settings = Config(
        engine=EngineConfig(target=paced_target(plan.step_ms)), server=ServerConfig(grpc_port=0, http_port=0)
    )
    async with AsyncExitStack() as stack:
        server = await stack.enter_async_context(LocalServer(settings, factory=FACTORY, tokenizer=TOKENIZER))
        config = ClusterConfig.model_validate(
            {
                "models": [{"name": _MODEL, "http_port": _free_port(), "grpc_port": _free_port()}],
                "listen": {"admin_port": 0},
            }
        )
        replica = Replica(
            "r0", _MODEL, _RELEASE, _HERE, server.http_port, server.grpc_port, "paced", ReplicaState.READY
        )
        fleet = with_replica(Fleet.of(config), replica)
        await stack.enter_async_context(EnvoyProcess(config, fleet, folder))
        model = config.models[0]
        assert model.http_port is not None
        http: list[Reader] = [HttpReader(server.http_port), HttpReader(model.http_port)]
        grpc: list[Reader] = [GrpcReader(server.grpc_address), GrpcReader(f"{_HERE}:{model.grpc_port}")]
        return {"http": await _by_turns(plan, http), "grpc": await _by_turns(plan, grpc)}


async def _by_turns(plan: HopPlan, readers: Sequence[Reader]) -> dict[str, Any]:
    for reader in readers:  # connections are made before anything counts
        await asyncio.gather(*(_call(reader, plan, _Way()) for _ in range(plan.streams)))
    ways = [_Way() for _ in readers]

    async def stream(number: int) -> None:
        for call in range(plan.calls):
            turn = (call + number) % len(readers)
            await _call(readers[turn], plan, ways[turn])

    await asyncio.gather(*(stream(number) for number in range(plan.streams)))
    for reader in readers:
        await reader.close()
    direct, envoy = (
        {"first_ms": spread(way.first_ms), "message_ms": spread(way.message_ms)} for way in ways
    )  # fmt: skip
    return {
        "direct": direct,
        "envoy": envoy,
        "added_first_p50_ms": round(envoy["first_ms"]["p50"] - direct["first_ms"]["p50"], 3),
        "added_first_p99_ms": round(envoy["first_ms"]["p99"] - direct["first_ms"]["p99"], 3),
        "added_message_mean_ms": round(envoy["message_ms"]["mean"] - direct["message_ms"]["mean"], 3),
    }


async def _call(reader: Reader, plan: HopPlan, way: _Way) -> None:
    sent = now_ns()
    way.take(sent, [message async for message in reader.read(_PROMPT, plan.messages * TOKENS)])


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="cluster.hop_bench", description=__doc__)
    plan = HopPlan()
    parser.add_argument("--streams", type=int, default=plan.streams)
    parser.add_argument("--calls", type=int, default=plan.calls)
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        found = asyncio.run(measure_hop(HopPlan(args.streams, args.calls), Path(folder)))
    json.dump(found, sys.stdout, indent=1)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
