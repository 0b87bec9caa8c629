"""A simulated engine with known costs: what happens to requests under overload."""

from __future__ import annotations

from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from random import Random

from server.admission import Admission
from server.errors import DeadlinePassedError, LateError
from server.request_stream import RequestStream
from specdec.core.types import Finished, FinishReason, Request, SpeculationStats, StoppingParams, Timings, Usage
from tests.server.admission.stub_engine import Clock, StubClient, admission, delta, principal, started

CHUNK = 192


@dataclass(frozen=True)
class Costs:
    """Seconds: of a step, of each row that it computes for a prompt, and of each that decodes. ``accepted``: draft
    tokens a step may add to a sequence, each as likely as ``chance`` after the one before."""

    step_s: float = 0.010
    prompt_row_s: float = 0.0008
    row_s: float = 0.0003
    accepted: int = 3
    chance: float = 0.4
    batch: int = 16


@dataclass
class Job:
    """One request on its way: times in seconds, of the simulation."""

    request: Request
    stream: RequestStream | None
    came_s: float
    prompt_left: int
    scheduled_s: float = 0.0
    first_s: float | None = None
    done: int = 0
    ended_s: float | None = None
    times: list[tuple[float, int]] = field(default_factory=list)


class SimulatedEngine:
    """Prompts are prefilled in order of arrival, `CHUNK` rows a step; running requests decode in the same steps."""

    def __init__(self, costs: Costs, seed: int = 0) -> None:
        self.costs, self.clock, self.random = costs, Clock(), Random(seed)
        self.client = StubClient(max_batch=costs.batch)
        self.admission: Admission = admission(self.client, self.clock)
        self.waiting: deque[Job] = deque()
        self.running: list[Job] = []
        self.jobs: list[Job] = []
        self.refused: list[LateError] = []
        self._numbers = iter(range(10**9))

    def ask(self, prompt: int, tokens: int, deadline_s: float | None = None) -> Job | None:
        """One request comes; None: it was refused."""
        stopping = StoppingParams(max_tokens=tokens, ignore_eos=True)
        name = f"r{next(self._numbers)}"
        request = Request(name, (1,) * prompt, stopping=stopping, deadline_s=deadline_s)
        try:
            stream = self.admission.admit(principal(), request)
        except LateError as error:
            self.refused.append(error)
            return None
        job = Job(stream.request, stream, self.clock.now, prompt)
        self.waiting.append(job)
        self.jobs.append(job)
        return job

    async def step(self) -> None:
        """One step, or a moment of waiting."""
        costs = self.costs
        for job in [*self.running, *self.waiting]:
            limit = job.request.deadline_s
            if limit is not None and self.clock.now - job.came_s > limit:
                await self._end(job, FinishReason.DEADLINE)
        decoding = [job for job in self.running if not job.prompt_left]
        rows, prefilled = CHUNK, list[Job]()
        for job in self.running:
            rows -= self._prefill(job, rows, prefilled)
        while rows and self.waiting and len(self.running) < costs.batch:
            job = self.waiting.popleft()
            self.running.append(job)
            job.scheduled_s = self.clock.now
            await self._tell(job, started(job.request))
            rows -= self._prefill(job, rows, prefilled)
        taken = (CHUNK - rows) * costs.prompt_row_s + len(decoding) * costs.row_s
        self.clock.now += costs.step_s + taken if self.running else 0.01
        for job in decoding:
            await self._emit(job, self._count())
        for job in prefilled:
            if not job.prompt_left:
                await self._emit(job, 1)

    @staticmethod
    def _prefill(job: Job, rows: int, prefilled: list[Job]) -> int:
        """Rows of the prompt that fit."""
        take = min(rows, job.prompt_left)
        if take:
            job.prompt_left -= take
            prefilled.append(job)
        return take

    def _count(self) -> int:
        count = 1
        while count <= self.costs.accepted and self.random.random() < self.costs.chance:
            count += 1
        return count

    async def _emit(self, job: Job, count: int) -> None:
        now, limit = self.clock.now, job.request.stopping.max_tokens
        assert limit is not None
        count = min(count, limit - job.done)
        job.first_s = now if job.first_s is None else job.first_s
        job.done += count
        job.times.append((now, count))
        await self._tell(job, delta(job.request, count))
        if job.done == limit:
            await self._end(job, FinishReason.LENGTH)

    async def _end(self, job: Job, reason: FinishReason) -> None:
        now = self.clock.now
        if job in self.running:
            self.running.remove(job)
        else:
            self.waiting.remove(job)
        first_s = job.first_s or now
        timings = Timings(prefill_ms=(first_s - job.scheduled_s) * 1e3, decode_ms=(now - first_s) * 1e3)
        usage = Usage(len(job.request.prompt_ids), 0, job.done)
        await self._tell(job, Finished(job.request.request_id, 0, reason, None, usage, SpeculationStats(), timings))
        if reason is not FinishReason.DEADLINE:
            job.ended_s = now

    async def _tell(self, job: Job, event: object) -> None:
        assert job.stream is not None
        self.client.say(event)  # type: ignore[arg-type]
        with suppress(DeadlinePassedError):
            await anext(job.stream)
        if isinstance(event, Finished):
            job.stream.close()
