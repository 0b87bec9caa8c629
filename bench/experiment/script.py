"""What an experiment asks, when and of which arm: a function of the plan alone, so a killed run can go on."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Container, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from bench.serve.schedule import endless_asks, read_trace
from server.experiment.assignment import balanced_order, digest
from server.experiment.config import ExperimentConfig, Load
from specdec.load.request import LoadRequest, TimedRequest


class PairedRequest(NamedTuple):
    """``pair``: what the records of both arms name; ``offset_s``: seconds after the beginning of its turn."""

    pair: str
    offset_s: float
    ask: LoadRequest


class Batch(NamedTuple):
    """``first``: the arm (0 or 1) that is asked first."""

    first: int
    asks: Sequence[PairedRequest]


_DRAWN = 1024


def arrival_times(load: Load) -> Iterator[float]:
    """Seconds after the beginning, ascending, the same for the same load; 0 for all where it is a closed loop.

    Gaps are even, or gamma distributed (of shape 1 for a Poisson process) with a mean of 1 / rate."""
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


OPEN_TURN = 32
_SEEDS = 1 << 31
_WARM_UP = "w"


class Script:
    """``attempt``: how often the run was taken up; pairs then get other names, as their first try may have left a
    record.

    **Order.** Turns of few requests: an arm is asked them, then the other one the same, with the same seeds and at the
    same distances in time. Which is first is drawn from the salt for every second turn; the turn after it has the
    opposite order (ABBA or BAAB), so a machine that gets slower in time slows both arms alike.

    **Caches.** The second arm must not find what the first one left behind: the prompt's keys and values, nor the
    answer to draft from. So every request has a cache salt that the other arm's does not have: with ``cache: cold`` one
    of its own, so that both meet an empty cache; with ``cache: warm`` one per arm, so that either has seen exactly the
    same requests before. A run that is taken up uses new salts: what one arm did just before the kill, only that arm
    would have in its cache. Servers that know no salts do not get them: two of them are equally warm anyway, since each
    is asked everything once; of one that serves both arms, whoever comes second finds the prompt in the cache, which
    the order makes as frequent in either arm, and which the arms' cached tokens show.

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
        """Requests of one arm, where both get each; None where only time ends it."""
        limits = [len(self._trace)] if self._trace is not None else []
        if self._config.stopping.max_requests is not None:
            limits.append(max(1, self._config.stopping.max_requests // 2))
        return min(limits, default=None)

    def warm_up(self) -> Iterator[Batch]:
        """What both arms are asked before anything counts; a trace's requests again and again, if it is short."""
        asks = itertools.islice(itertools.cycle(self._prompts()), self._config.warmup_requests)
        for number, ask in enumerate(asks):
            yield Batch(self.first(number), [self.paired(f"{_WARM_UP}{number:06}", 0.0, ask)])

    def probe(self) -> LoadRequest:
        """A short request, to see whether an arm can be asked at all."""
        return dataclasses.replace(self.paired("probe", 0.0, next(self._prompts())).ask, max_tokens=1)

    def turns(self, done: Container[int]) -> Iterator[Batch]:
        """All that counts, but for the requests whose numbers are ``done``."""
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
        """The arm that is asked first."""
        return balanced_order(self._salt, "order", turn)

    def in_arm(self, arm: int, paired: PairedRequest) -> LoadRequest:
        """The request as an arm is asked it: named as its pair, with a salt that only this arm uses."""
        whose = paired.pair if self._load.cache == "cold" else self._tag
        salt = digest(self._salt, f"cache/{arm}/{whose}/{paired.ask.salt}").hex()
        return dataclasses.replace(paired.ask, name=paired.pair, salt=salt)

    @staticmethod
    def number(pair: str) -> int | None:
        """The number in a pair's name; None: it warmed up."""
        return None if pair.startswith(_WARM_UP) else int(pair.partition(".")[0])

    def _prompts(self) -> Iterator[LoadRequest]:
        load = self._load
        if self._trace is not None:
            return (timed.ask for timed in self._trace)
        assert load.workload is not None  # the plan was checked
        asks = endless_asks(load.workload, load.max_tokens)
        return (ask.of_fixed_length() for ask in asks) if load.fixed_length else asks

    def paired(self, name: str, offset_s: float, ask: LoadRequest) -> PairedRequest:
        """The request, with a seed, under a name that says how often the run was taken up."""
        if ask.seed is None:
            drawn = int.from_bytes(digest(self._salt, f"seed/{self._load.seed}/{name}")) % _SEEDS
            ask = dataclasses.replace(ask, seed=drawn)
        return PairedRequest(name + self._tag, offset_s, ask)
