"""Requests of an experiment, their times and order: a function of the plan alone, so that a killed run can resume."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.serve.schedule import endless_requests, read_trace
from server.experiment.assignment import balanced_order, digest
from server.experiment.config import ExperimentConfig, Load
from specdec.load.request import LoadRequest, TimedRequest


class PairedRequest(NamedTuple):
    pair: str  # in the records of both arms
    offset_s: float  # after the beginning of its turn
    ask: LoadRequest


class Batch(NamedTuple):
    first: int  # the arm (0 or 1) that gets them first
    asks: Sequence[PairedRequest]


_DRAWN = 1024  # gaps drawn at a time


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds after the beginning, ascending, deterministic for a load; all 0 in a closed loop.

    Gaps are constant, or gamma distributed (shape 1 for a Poisson process) with a mean of 1 / rate.
    """
    if load.rate is None:
        return itertools.repeat(0.0)
    if load.arrivals == "constant":
        rate = load.rate
        return (number / rate for number in itertools.count())
    return _random_times(load.rate, 1.0 if load.arrivals == "poisson" else load.shape, load.seed)


def _random_times(rate: float, shape: float, seed: int) -> Iterator[float]:
    rng, now = np.random.default_rng(seed), 0.0
    while True:
        for gap in rng.gamma(shape, 1 / (shape * rate), _DRAWN):
            now += float(gap)
            yield now


OPEN_TURN = 32  # requests of a turn in an open loop
_SEEDS = 1 << 31  # number of seeds
_WARM_UP = "w"


class Script:
    """attempt: number of earlier runs. A resumed run names its pairs differently, because an earlier try may have left
    a record.

    **Order.** An arm gets a turn of few requests, then the other arm gets the same, with the same seeds and gaps. Which
    arm is first is random for every second turn; the next turn has the opposite order (ABBA or BAAB), so a machine that
    slows down over time slows both arms alike.

    **Caches.** The second arm must not find what the first one cached: the prompt's keys and values, or the answer as a
    draft. So every request has a cache salt that differs between the arms: with ``cache: cold`` one of its own, so that
    both find an empty cache; with ``cache: warm`` one per arm, so that both have served exactly the same requests
    before. A resumed run uses new salts, because only the last arm's requests would be cached. Servers without salts do
    not get them. Two such servers are equally warm, since each gets everything once. On a single one, the second arm
    finds the prompt in the cache; the order makes this equally frequent in both arms, and their cached tokens show it.

    Raises:
        ConfigError: the trace cannot be read.
        WorkloadUnavailableError: the workload's prompts are not installed.
    """

    def __init__(self, config: ExperimentConfig, attempt: int) -> None:
        self._config, self._load = config, config.load
        self._salt = config.assignment.salt or config.name
        self._tag = f".{attempt}" if attempt else ""
        self._trace = None if config.load.trace is None else read_trace(config.load.trace, config.load.speed)
        next(self._prompts())

    @property
    def planned(self) -> int | None:
        """Requests per arm of a paired run; None if only time limits it."""
        limits = [len(self._trace)] if self._trace is not None else []
        if self._config.stopping.max_requests is not None:
            limits.append(max(1, self._config.stopping.max_requests // 2))
        return min(limits, default=None)

    def warm_up(self) -> Iterator[Batch]:
        """The requests before measurement; a short trace is repeated."""
        asks = itertools.islice(itertools.cycle(self._prompts()), self._config.warmup_requests)
        for number, ask in enumerate(asks):
            yield Batch(self.first(number), [self.paired(f"{_WARM_UP}{number:06}", 0.0, ask)])

    def probe(self) -> LoadRequest:
        """A short request that tests whether an arm works."""
        return dataclasses.replace(self.paired("probe", 0.0, next(self._prompts())).ask, max_tokens=1)

    def turns(self, done: Container[int]) -> Iterator[Batch]:
        """All measured requests, except those whose numbers are ``done``."""
        load = self._load
        size = load.per_turn or (OPEN_TURN if load.open_loop else load.concurrency)
        numbered = enumerate(itertools.islice(self.schedule(), self.planned))
        for turn in itertools.count():
            chosen = list(itertools.islice(numbered, size))
            if not chosen:
                return
            start = chosen[0][1].offset_s
            left = [self.paired(f"{n:06}", at - start, ask) for n, (at, ask) in chosen if n not in done]
            if left:
                yield Batch(self.first(turn), left)

    def schedule(self) -> Iterator[TimedRequest]:
        """The requests of one arm with their arrival times, 0 in a closed loop; without end unless there is a trace."""
        if self._trace is not None:
            return iter(self._trace)
        asks = itertools.islice(self._prompts(), self._config.warmup_requests, None)
        return map(TimedRequest, arrival_times(self._load), asks)

    def first(self, turn: int) -> int:
        """The arm that is first in a turn."""
        return balanced_order(self._salt, "order", turn)

    def in_arm(self, arm: int, paired: PairedRequest) -> LoadRequest:
        """The request as sent to an arm: named after its pair, with a salt that only this arm uses."""
        whose = paired.pair if self._load.cache == "cold" else self._tag
        salt = digest(self._salt, f"cache/{arm}/{whose}/{paired.ask.salt}").hex()
        return dataclasses.replace(paired.ask, name=paired.pair, salt=salt)

    @staticmethod
    def number(pair: str) -> int | None:
        """The number in a pair's name; None for warm-up."""
        return None if pair.startswith(_WARM_UP) else int(pair.partition(".")[0])

    def _prompts(self) -> Iterator[LoadRequest]:
        load = self._load
        if self._trace is not None:
            return (timed.ask for timed in self._trace)
        assert load.workload is not None  # checked by `read_plan`
        asks = endless_requests(load.workload, load.max_tokens)
        return (ask.of_fixed_length() for ask in asks) if load.fixed_length else asks

    def paired(self, name: str, offset_s: float, ask: LoadRequest) -> PairedRequest:
        """The request with a seed, under a name that includes the attempt."""
        if ask.seed is None:
            drawn = int.from_bytes(digest(self._salt, f"seed/{self._load.seed}/{name}")) % _SEEDS
            ask = dataclasses.replace(ask, seed=drawn)
        return PairedRequest(name + self._tag, offset_s, ask)
