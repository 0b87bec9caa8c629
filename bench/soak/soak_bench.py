"""Puts mixed load on a server of our own in shifts, and looks at it between them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random

import httpx

from bench.local_server import LocalServer
from bench.soak.look import Look
from bench.soak.place import Place
from bench.soak.rest import come_to_rest
from bench.soak.run_clock import RunClock
from bench.soak.soak_fault import SoakFault
from bench.soak.soak_plan import SoakPlan
from bench.soak.soak_report import SoakReport
from bench.soak.tally import Tally
from bench.soak.visitor import Visitor
from bench.soak.within import within
from bench.texts import long_text
from specdec.client import CallError, Client, Credentials, RetryPolicy
from specdec.config import Config
from specdec.types import SamplingParams, StoppingParams

CANARY, CANARY_TOKENS = "def fibonacci(n):\n", 24
_ONCE = RetryPolicy(attempts=1)


async def run_soak(config: Config, plan: SoakPlan, seen: Callable[[Look, Tally], None]) -> SoakReport:
    """``config`` must have an HTTP port. ``seen`` is shown every look as it is taken, and the tally until then.

    Raises:
        LocalServerError: the server did not start.
    """
    tally, looks, answers = Tally(), list[Look](), list[str]()
    whole_s = plan.minutes * 60
    async with LocalServer(config) as server, RunClock() as clock:
        shift = 0
        while shift == 0 or clock.running_s < whole_s:
            shift += 1
            await _shift(server, plan, tally, clock, shift, min(clock.running_s + plan.shift_s, whole_s))
            try:
                answers.append(await within(_canary(server), plan.hang_s, "the answer"))
                looks.append(await come_to_rest(server, clock, tally.visits, plan.rest_s))
            except (CallError, SoakFault) as error:
                tally.fault("look", str(error))
            else:
                seen(looks[-1], tally)
        return SoakReport(plan, tally, looks, answers, clock.stops)


async def _shift(
    server: LocalServer, plan: SoakPlan, tally: Tally, clock: RunClock, shift: int, until_s: float
) -> None:
    """All visitors, until the clock shows ``until_s`` and each has ended what it began."""
    text = long_text()
    async with asyncio.TaskGroup() as tasks:
        for number in range(plan.clients):
            place = Place(
                number,
                Client(server.grpc_address, Credentials(), _ONCE),
                httpx.AsyncClient(base_url=f"http://127.0.0.1:{server.http_port}", timeout=None),
                server.grpc_port,
                server.http_port,
                text,
                Random(f"{plan.seed}/{shift}/{number}"),
            )
            tasks.create_task(Visitor(place, tally, clock, plan.hang_s).stay(until_s))


async def _canary(server: LocalServer) -> str:
    """A greedy answer, which must be the same each time."""
    async with Client(server.grpc_address, Credentials(), _ONCE) as client:
        stopping = StoppingParams(max_tokens=CANARY_TOKENS, ignore_eos=True)
        answer = await client.generate(CANARY, sampling=SamplingParams(temperature=0.0), stopping=stopping)
        return answer.samples[0].text
