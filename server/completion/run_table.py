"""Runs in flight: equal requests share one, equal prompts are computed once."""

from __future__ import annotations

import asyncio
from collections.abc import Hashable
from dataclasses import replace

from server.auth.principal import Principal
from server.completion.event_source import Submit
from server.completion.shared_run import SharedRun
from specdec.types import Request, SpeculationParams

SHORTEST_SHARED = 64  # tokens of a prompt below which the prefix cache, which knows whole pages, has nothing to share


class RunTable:
    """The engine holds back the further samples of a request until its prompt is cached. Here the same is done for
    requests that come one by one, as editors send them: one whose prompt is being computed waits until that is done,
    and one that would get the very same answer gets that one.

    Callers share with their own tenant and cache salt only.
    """

    def __init__(self, submit: Submit) -> None:
        self._submit = submit
        self._equal: dict[Hashable, tuple[SharedRun, float | None]] = {}
        self._prompts: dict[Hashable, SharedRun] = {}
        self._runs: set[SharedRun] = set()

    @property
    def in_flight(self) -> int:
        """Runs that have not ended."""
        return len(self._runs)

    async def start(self, principal: Principal, request: Request, supersedes_key: str = "") -> tuple[SharedRun, bool]:
        """A run of ``request`` that the caller reads, and has to leave; and whether it is somebody else's too.

        Raises:
            RequestError: the request is not taken.
        """
        owner = (principal.tenant, request.cache_salt)
        equal = None if supersedes_key else _equal_key(request)
        prompt = (owner, request.prompt_ids) if len(request.prompt_ids) > SHORTEST_SHARED else None
        loop = asyncio.get_running_loop()
        until = None if request.deadline_s is None else loop.time() + request.deadline_s
        while True:
            if equal is not None and (found := self._equal.get((owner, equal))) is not None:
                run, its_end = found
                if its_end is None or (until is not None and until <= its_end):
                    run.join()
                    return run, True
            first = None if prompt is None else self._prompts.get(prompt)
            if first is None:
                break
            seen = len(first.events)
            await first.more(seen)
        if until is not None:
            request = replace(request, deadline_s=max(1e-3, until - loop.time()))
        run = SharedRun(self._submit(principal, request, supersedes_key), self._changed)
        self._runs.add(run)
        if equal is not None:
            self._equal[owner, equal] = (run, until)
        if prompt is not None:
            self._prompts[prompt] = run
        return run, False

    def _changed(self, run: SharedRun) -> None:
        for prompt in [prompt for prompt, first in self._prompts.items() if first is run]:
            del self._prompts[prompt]
        if run.ended:
            self._runs.discard(run)
            for equal in [equal for equal, (other, _) in self._equal.items() if other is run]:
                del self._equal[equal]


def _equal_key(request: Request) -> Request | None:
    """All of ``request`` that decides about its answer; None where chance or the clock decides too."""
    stopping = request.stopping
    chance = request.sampling.temperature != 0 and request.sampling.seed is None
    if chance or stopping.time_limit_s is not None or stopping.decode_limit_s is not None:
        return None
    return replace(
        request, request_id="", speculation=SpeculationParams(), priority=0, deadline_s=None, prediction_ids=(),
        session="", target_tpot_ms=None,
    )  # fmt: skip
