"""A server over a small real engine as a target for fuzzing, and checks that it is unharmed."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

from bench.local_server import LocalServer
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from tests.soak.watch import Look, come_to_rest, memory_bytes

CACHE = Path("~/.cache/specdec").expanduser()
AT_ONCE = 16
FEW = 40  # inputs per endpoint, in the suite
REST_S = 60.0
SHOWN = 20
MEMORY_BYTES = 64 << 20


class FuzzedServer:
    """``problems``: the failures, with instructions to reproduce them."""

    def __init__(self, server: LocalServer, before: Look) -> None:
        self.server, self._before = server, before
        self.problems: list[str] = []

    async def throw(self, count: int, one: Callable[[int], Awaitable[str | None]]) -> None:
        """Call ``one`` with each number below ``count``, `AT_ONCE` concurrently; a returned value is a problem."""
        numbers = iter(range(count))

        async def work() -> None:
            for number in numbers:
                problem = await one(number)
                if problem is not None:
                    self.problems.append(problem)

        await asyncio.gather(*(work() for _ in range(AT_ONCE)))

    async def unharmed(self) -> None:
        """Assert that there is no problem, and that no resource is held."""
        assert not self.problems, f"{len(self.problems)} problems:\n" + "\n".join(self.problems[:SHOWN])
        after = await come_to_rest(self.server, 0, REST_S)
        assert after.left == {}
        assert after.restarts == 0
        opened = after.files - self._before.files
        assert opened <= 4, f"{opened} more file descriptors are open than at first"


@asynccontextmanager
async def fuzzed_server() -> AsyncIterator[FuzzedServer]:
    """A ready server with short contexts, so that accepted requests end soon."""
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=64 * 64, max_batch=16, max_context=192,
        max_step_rows=96, prefill_chunk=64, speculation=SpeculationConfig(profile_s=0),
    )  # fmt: skip
    config = Config(engine=engine, server=ServerConfig(grpc_port=0, http_port=0, log_calls=False))
    async with LocalServer(config) as server:
        yield FuzzedServer(server, await come_to_rest(server, 0, REST_S))


async def settled_bytes(server: LocalServer) -> dict[str, int]:
    """Memory of the processes once it falls no more."""
    before = memory_bytes(server)
    while True:
        await asyncio.sleep(3)  # memory of large messages is returned 2 s after them
        after = memory_bytes(server)
        if all(after[name] >= before[name] for name in after):
            return after
        before = after


async def assert_returned(server: LocalServer, before: dict[str, int]) -> None:
    """Assert that each process has released the memory allocated since ``before``, except for `MEMORY_BYTES`."""
    after = await settled_bytes(server)
    grown = {name: after[name] - before[name] for name in after}
    print("memory left behind: " + ", ".join(f"{name} {count / 2**20:.1f} MiB" for name, count in grown.items()))
    assert max(grown.values()) <= MEMORY_BYTES
