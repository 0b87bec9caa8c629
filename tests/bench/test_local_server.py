"""A measured server ends with the process that started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil

ROOT = Path(__file__).parents[2]
STARTS_ONE = """
import asyncio
from bench.local_server import LocalServer
from specdec.config import Config, ServerConfig

async def main():
    config = Config(server=ServerConfig(grpc_port=0, http_port=None))
    factory, tokenizer = "tests.fake_engine:echo", "tests.server.fake_tokenizer:FakeTokenizer"
    async with LocalServer(config, factory=factory, tokenizer=tokenizer) as server:
        print(server.frontend.pid, server.engine.pid, flush=True)
        await asyncio.sleep(100)

asyncio.run(main())
"""


def test_it_ends_when_its_starter_is_killed() -> None:
    starter = subprocess.Popen([sys.executable, "-c", STARTS_ONE], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert starter.stdout is not None
    try:
        found = [psutil.Process(int(pid)) for pid in starter.stdout.readline().split()]
        assert len(found) == 2
    finally:
        starter.kill()
        starter.wait(30)
        starter.stdout.close()
    _, alive = psutil.wait_procs(found, 60)
    assert not alive
