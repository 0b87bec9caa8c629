"""A served target over two processes: when either process ends, all are restarted."""

from __future__ import annotations

import asyncio
import os
import signal

import psutil
import pytest

from server.engine_process import DEFAULT_FACTORY
from server.engine_supervisor import EngineState
from specdec.config import Config, ServerConfig
from specdec.core.types import Request, SamplingParams, StoppingParams
from tests.engine.test_tensor_parallel import gone, tiny_config
from tests.server.harness import make_client


@pytest.mark.slow
@pytest.mark.parametrize("who", ["rank", "engine"])
async def test_the_server_restarts_all_ranks_and_leaves_no_process(who: str) -> None:
    config = Config(engine=tiny_config("random:tiny", 2), server=ServerConfig(grpc_port=0, http_port=None))
    client = make_client(config, factory=DEFAULT_FACTORY)
    states = client.engine.watch()
    await client.engine.start()
    try:
        await client.engine.wait_ready()
        assert client.engine.pid is not None
        assert client.info.tp == 2
        engine = psutil.Process(client.engine.pid)
        (rank,) = engine.children()
        os.kill(rank.pid if who == "rank" else engine.pid, signal.SIGKILL)  # an idle one
        while await states.get() is not EngineState.RESTARTING:
            pass
        await client.engine.wait_ready()
        async with asyncio.timeout(30):
            while not (gone(engine) and gone(rank)):
                await asyncio.sleep(0.01)
        request = Request("r", (1, 2, 3), SamplingParams(temperature=0.0), StoppingParams(max_tokens=3))
        async with client.generate(request) as stream:
            assert [event async for event in stream]
    finally:
        await client.engine.close()
