"""An arm whose latencies and tokens are known."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from statistics import NormalDist

from server.experiment.assignment import digest
from specdec.errors import SpecdecError
from specdec.load.request import LoadRequest, Record

TOKENS = 8


class KilledError(Exception):
    """Ends a run like a kill: nothing handles it."""


def uniform(*words: object) -> float:
    """A number in (0, 1), a function of ``words``."""
    return (int.from_bytes(digest("fake", repr(words))) + 0.5) / 2**64


def lognormal(sigma: float, *words: object) -> float:
    """A log-normal number of median 1, a function of ``words``."""
    return math.exp(sigma * NormalDist().inv_cdf(uniform(*words)))


def prompt_of(ask: LoadRequest) -> object:
    """The identity of a prompt, independent of the request's name."""
    return ask.text, ask.chat, ask.gap, ask.ids


class FakeArm:
    """Takes ``took`` seconds, a tenth of it to the first text, and says `TOKENS` tokens that the prompt and the seed
    decide; ``wrong`` tells for which prompts the last one is another. Fails for those of ``fails``; ``asked`` holds
    every request with the time it came."""

    def __init__(
        self,
        took: Callable[[LoadRequest], float] = lambda ask: 0.2,
        *,
        wrong: Callable[[LoadRequest], bool] = lambda ask: False,
        fails: Callable[[LoadRequest], bool] = lambda ask: False,
        tells_ids: bool = True,
    ) -> None:
        self._took, self._wrong, self._fails, self._tells_ids = took, wrong, fails, tells_ids
        self.asked: list[tuple[float, LoadRequest]] = []

    async def send(self, ask: LoadRequest, record: Record) -> None:
        clock = asyncio.get_running_loop().time
        self.asked.append((clock(), ask))
        if self._fails(ask):
            raise SpecdecError("broken")
        took = self._took(ask)
        ids = list(digest("tokens", repr((prompt_of(ask), ask.seed))))[:TOKENS]
        ids[-1] += self._wrong(ask)
        await asyncio.sleep(took / 10)
        record.chunk(clock(), 1)
        record.text += "a"
        await asyncio.sleep(took - took / 10)
        record.chunk(clock(), TOKENS - 1)
        record.text += chr(ids[-1] + 100)
        record.token_ids = ids if self._tells_ids else None
        record.queue_ms, record.prompt_tokens, record.output_tokens = 1.0, 7, TOKENS
        record.steps(3, 2, [1, 1])

    async def close(self) -> None:
        pass
