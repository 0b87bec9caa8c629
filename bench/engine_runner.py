"""Runs groups of prompts on an engine as a server would."""

from __future__ import annotations

import dataclasses
import itertools
import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from bench.engine_arm import OFF, Arm
from bench.engine_flight import Flight, fly
from bench.engine_group_run import GroupRun
from bench.workloads.bench_prompt import BenchPrompt
from specdec.engine.engine import Engine
from specdec.types import Request, SamplingParams, StoppingParams


class EngineRunner:
    """``sampling`` needs a seed unless it is greedy, or the arms would draw different texts."""

    def __init__(
        self, engine: Engine, sampling: SamplingParams, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._engine, self._sampling, self._clock = engine, sampling, clock
        self._serial = itertools.count()

    def run(self, group: Seq[BenchPrompt], arm: Arm, salt: str, at_once: int | None = None) -> GroupRun:
        """All of ``group`` to the end, with nothing beside it; as `start`.

        Raises:
            BenchError, RequestError: as `Flight.step`.
        """
        flight = self.start(group, arm, salt, at_once)
        fly([flight])
        return flight.result()

    def start(self, group: Seq[BenchPrompt], arm: Arm, salt: str, at_once: int | None = None) -> Flight:
        """``group``, ready for its first step, ``at_once`` prompts at a time (None: all). ``salt`` separates prefix
        cache and draft texts from other runs'.

        The prompts of a larger group are prefilled before, so that its time is that of decoding together.

        Raises:
            RequestError: the engine refused a prompt.
        """
        requests = [self._request(prompt, arm, salt) for prompt in group]
        if len(requests) > 1:
            self._prefill(requests)
        return Flight(self._engine, requests, [prompt.name for prompt in group], at_once, self._clock)

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
