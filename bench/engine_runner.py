"""Runs groups of prompts on an engine as a server would, and takes the time of its steps."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bench.engine_arm import OFF, Arm
from bench.engine_bench_error import BenchError
from bench.engine_group_run import GroupRun
from bench.engine_request_run import RequestRun
from bench.workloads.bench_prompt import BenchPrompt
from specdec.engine.engine import Engine
from specdec.types import Delta, Failed, Finished, Request, RequestEvent, SamplingParams, StoppingParams


class EngineRunner:
    """The clock runs only while the engine steps: what the benchmark does between steps costs nobody anything.

    ``sampling`` needs a seed unless it is greedy, or the arms would draw different texts.
    """

    def __init__(
        self, engine: Engine, sampling: SamplingParams, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._sampling, self._clock = engine, sampling, clock
        self._serial = itertools.count()

    def run(self, group: Seq[BenchPrompt], arm: Arm, salt: str, at_once: int | None = None) -> GroupRun:
        """All of ``group`` to the end, ``at_once`` at a time (None: all). ``salt`` separates prefix cache and draft
        texts from other runs'.

        The prompts of a larger group are prefilled before, so that its time is that of decoding together.

        Raises:
            BenchError: the engine failed a request.
            RequestError: it refused one.
        """
        requests = [self._request(prompt, arm, salt) for prompt in group]
        if len(requests) > 1:
            self._prefill(requests)
        runs = {request.request_id: RequestRun(prompt.name) for request, prompt in zip(requests, group, strict=True)}
        first: dict[str, float] = {}
        busy = 0.0
        waiting = deque(requests)
        running = 0
        while waiting or self._engine.has_work():
            while waiting and (at_once is None or running < at_once):
                self._engine.submit(waiting.popleft())
                running += 1
            began = self._clock()
            events = self._engine.step()
            busy += self._clock() - began
            for event in events:
                running -= isinstance(event, Finished)
                _take(runs[event.request_id], event)
                if isinstance(event, Delta) and event.token_ids:
                    run = runs[event.request_id]
                    if event.request_id not in first:
                        first[event.request_id], run.first_tokens = busy, len(event.token_ids)
                    run.decode_s = busy - first[event.request_id]
        return GroupRun(tuple(runs.values()), busy)

    def _prefill(self, requests: Seq[Request]) -> None:
        """Into the prefix cache, and nowhere else: drafters do not hear of it."""
        for request in requests:
            self._engine.submit(
                dataclasses.replace(
                    request,
                    request_id=f"{request.request_id}-prefill",
                    stopping=StoppingParams(max_tokens=0),
                    speculation=OFF.speculation,
                )
            )
        while self._engine.has_work():
            self._engine.step()

    def _request(self, prompt: BenchPrompt, arm: Arm, salt: str) -> Request:
        return Request(
            f"bench-{next(self._serial)}",
            prompt.prompt_ids,
            self._sampling,
            prompt.stopping,
            speculation=arm.speculation,
            cache_salt=salt,
            prediction_ids=prompt.prediction_ids,
            session=f"{salt}/{prompt.session}" if prompt.session else "",
        )


def _take(run: RequestRun, event: RequestEvent) -> None:
    if isinstance(event, Failed):
        raise BenchError(f"{run.prompt}: the engine failed ({event.reason}: {event.message})")
    if isinstance(event, Delta):
        run.tokens += event.token_ids
        run.text += event.text
    elif isinstance(event, Finished):
        run.reason, run.stats, run.usage = event.reason, event.stats, event.usage
