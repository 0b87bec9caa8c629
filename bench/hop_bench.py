"""Measures the latency that Envoy adds to a call: ``python -m bench.hop_bench``.

A scripted server writes into every message the time at which it left the engine. Streams call it directly and through
Envoy in turn, so that both paths run under the same conditions.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import socket
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.frontend.frontend_bench import FACTORY, TOKENIZER, GrpcReader, HttpReader
from bench.frontend.paced_engine import TOKENS, now_ns, paced_target, read_stamps
from bench.local_server import LocalServer
from cluster.config import ClusterConfig
from cluster.envoy_process import EnvoyProcess
from cluster.fleet import Fleet, Replica, ReplicaState, with_replica
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.load.figures import spread

_MODEL, _RELEASE, _HERE = "paced", "blue", "127.0.0.1"
_PROMPT = "def add(first, second):"


@dataclass(frozen=True, slots=True)
class HopPlan:
    """``streams`` at a time make ``calls`` calls each for one message, after pauses of ``pause_s`` seconds in the mean.
    Then one, and then all of them, read ``messages`` messages, one per step of ``step_ms``, ``rounds`` times."""

    streams: int = 16
    calls: int = 60
    pause_s: float = 0.15
    rounds: int = 20
    messages: int = 12
    step_ms: float = 30.0


Reader = HttpReader | GrpcReader


async def measure_hop(plan: HopPlan, folder: Path) -> dict[str, Any]:
    """JSON-able figures by protocol, each way's and what Envoy adds: to the first message of a call, to a further one
    that comes alone, and to one that comes together with one of every other stream.

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
    # Connections are made, and whatever a server does only once is done, before anything counts.
    await _in_rounds(plan, readers, plan.streams, 2 * len(readers))
    first = await _with_pauses(plan, readers)
    alone = await _in_rounds(plan, readers, 1, plan.rounds)
    burst = await _in_rounds(plan, readers, plan.streams, plan.rounds)
    for reader in readers:
        await reader.close()
    kinds = {"first_ms": first, "message_ms": alone, "burst_message_ms": burst}
    spreads = {kind: {"direct": spread(ways[0]), "envoy": spread(ways[1])} for kind, ways in kinds.items()}
    added = {
        kind: {figure: round(ways["envoy"][figure] - ways["direct"][figure], 3) for figure in ("mean", "p50", "p99")}
        for kind, ways in spreads.items()
    }
    return {"added": added, **spreads}


async def _with_pauses(plan: HopPlan, readers: Sequence[Reader]) -> list[list[float]]:
    """Milliseconds from a call to its only message, without the engine's part, each way."""
    found: list[list[float]] = [[] for _ in readers]
    draw = random.Random(1)

    async def stream(number: int) -> None:
        for call in range(plan.calls):
            await asyncio.sleep(draw.uniform(0.0, 2 * plan.pause_s))
            turn, sent_ns = (call + number) % len(readers), now_ns()
            async for at_ns, text in readers[turn].read(_PROMPT, TOKENS):
                submitted_ns, emitted_ns = read_stamps(text)
                found[turn].append((at_ns - sent_ns - (emitted_ns - submitted_ns)) / 1e6)

    await asyncio.gather(*(stream(number) for number in range(plan.streams)))
    return found


async def _in_rounds(plan: HopPlan, readers: Sequence[Reader], streams: int, rounds: int) -> list[list[float]]:
    """Milliseconds from the engine to the reader, each way. An engine's step brings a message to each of its streams at
    once. All of a round go one way, or the reader would take those first that came directly."""
    found: list[list[float]] = [[] for _ in readers]

    async def stream(turn: int) -> None:
        messages = [message async for message in readers[turn].read(_PROMPT, plan.messages * TOKENS)]
        found[turn] += [(at_ns - read_stamps(text)[-1]) / 1e6 for at_ns, text in messages[1:]]

    for number in range(rounds):
        await asyncio.gather(*(stream(number % len(readers)) for _ in range(streams)))
    return found


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((_HERE, 0))
        return int(probe.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> int:
    """Print the figures as JSON."""
    parser = argparse.ArgumentParser(prog="bench.hop_bench", description=__doc__)
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
