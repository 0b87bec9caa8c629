"""Mixed requests with random cancels and faults leave nothing behind: no page, stream, task, thread or file."""

from __future__ import annotations

import asyncio
import gc
import random
import threading
from contextlib import suppress
from dataclasses import dataclass, field

import psutil
import pytest

from server.auth.principal import ANYBODY
from server.engine_supervisor import RestartPolicy
from server.served_model import ServedModel
from specdec.core.types import Request, SamplingParams, StoppingParams
from specdec.errors import EngineDeadError, RequestError
from tests.fake_engine import SOAKED
from tests.server.harness import make_client, make_config, unread_bytes

CALLERS = 16
FAULTS = ("broken", "full", "long", "bug")  # of one request; every fourth fault stops the engine


@dataclass
class Soak:
    """``total`` requests by `CALLERS` callers, ``faults`` of them with a fault."""

    model: ServedModel
    total: int
    faults: int
    rng: random.Random = field(default_factory=lambda: random.Random(7))
    sent: int = 0
    cancelled: int = 0
    failed: int = 0
    complete: int = 0

    async def run(self) -> None:
        """Send all requests."""
        numbers = iter(range(self.total))
        at_fault = set(self.rng.sample(range(self.total), self.faults))
        await asyncio.gather(*(self._caller(numbers, at_fault) for _ in range(CALLERS)))

    async def _caller(self, numbers: object, at_fault: set[int]) -> None:
        for number in numbers:  # type: ignore[attr-defined]
            await self._one(number, number in at_fault)

    async def _one(self, number: int, fault: bool) -> None:
        rng = self.rng
        script = ("die" if number % 4 == 0 else rng.choice(FAULTS)) if fault else ""
        prompt = tuple(rng.choices(range(3, 250), k=rng.choice((5, 80))))
        if rng.random() < 0.3 and not fault:
            prompt = tuple(range(100))  # equal prompts
        request = Request(
            f"r{number}", prompt, SamplingParams(temperature=rng.choice((0.0, 1.0)), n=rng.choice((1, 1, 3))),
            StoppingParams(max_tokens=rng.choice((1, 8, 30))), cache_salt=script, priority=rng.choice((0, 1)),
            deadline_s=None if fault else rng.choice((None, None, 5.0, 0.001)),
            omitted=rng.choice((None, (0, 0, 0, 0))),
        )  # fmt: skip
        while not self.model.client.engine.is_ready:
            await asyncio.sleep(0.01)
        self.sent += 1
        limit = rng.choice((None, None, 0, 2))
        try:
            await self._ask(request, limit)
        except RequestError:
            self.failed += 1
        else:
            self.cancelled += limit is not None
            self.complete += limit is None

    async def _ask(self, request: Request, limit: int | None) -> None:
        key = "k" if self.rng.random() < 0.1 else ""
        async with self.model.admission.admit(ANYBODY, request, key) as stream:
            if self.rng.random() < 0.1 and not request.cache_salt:  # a fault happens in any case
                self.model.admission.abort(ANYBODY, request.request_id)
            seen = 0
            async for _ in stream:
                seen += 1
                if limit is not None and seen > limit:
                    return


@pytest.mark.parametrize(
    ("total", "faults"), [(400, 8), pytest.param(20_000, 200, marks=[pytest.mark.slow, pytest.mark.timeout(1800)])]
)
async def test_no_resource_is_leaked(total: int, faults: int) -> None:
    process = psutil.Process()
    client = make_client(make_config(), factory=SOAKED, policy=RestartPolicy(first_s=0.01, longest_s=0.02, quick_s=0.0))
    model = ServedModel(client)
    await client.engine.start()
    await client.engine.wait_ready()
    gc.collect()  # what earlier tests left would close meanwhile
    tasks, threads, descriptors = len(asyncio.all_tasks()), threading.active_count(), process.num_fds()
    soak = Soak(model, total, faults)
    await soak.run()
    assert soak.sent == total == soak.cancelled + soak.failed + soak.complete
    assert min(soak.cancelled, soak.failed, soak.complete) > faults
    assert client.engine.restarts > 0
    async with asyncio.timeout(20):
        with suppress(EngineDeadError):
            await client.engine.wait_ready()
        load = client.engine.load
        while load.total_pages == 0 or load.running_requests or load.free_pages < load.total_pages:
            await asyncio.sleep(0.05)
            load = client.engine.load
        while len(asyncio.all_tasks()) > tasks:
            await asyncio.sleep(0.01)
    assert (client.in_flight, model.admission.in_flight, model.admission.waiting_tokens) == (0, 0, 0)
    assert unread_bytes(client) == 0
    assert threading.active_count() <= threads
    assert process.num_fds() <= descriptors
    await client.engine.close()
    model.tokenizer.close()
