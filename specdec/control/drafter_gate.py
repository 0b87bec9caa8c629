"""Who is asked to draft: where its expected gain exceeds its cost, or where finding out is worth what that costs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from specdec.control.inputs import DraftRecord, SequenceInputs

PRIOR_STEPS = 4.0  # that the prior of a drafter that nobody has tried weighs as much as
DOUBT_STEPS = 2.0  # the same beside what was known at the start: requests may be others since
POOL_STEPS = 8.0  # of a sequence's own that weigh as much as what other sequences of its temperature showed
KEEP, POOL_KEEP = 0.95, 0.995  # of what is known of a sequence, and of all, from one asking to the next
LEAST_AHEAD = 48  # tokens that a sequence is thought to emit yet, or as many as it did: an answer may end any time
FUTURE = 300.0  # tokens of requests to come for which it matters what a drafter is worth
TRIAL = 4.0  # steps that a trial takes
LEAST_ROOM = 8  # tokens left below which nothing is found out


@dataclass(frozen=True, slots=True)
class GatePrices:
    """token_ms: what a token takes otherwise, in a batch like this. row_ms: of verifying a node. levels: by the number
    of sequences that draft, from none, milliseconds of a level that they share. reading_ms: what a sequence to come
    costs before its first draft."""

    token_ms: float
    row_ms: float
    levels: Sequence[float]
    reading_ms: float = 0.0


@dataclass(slots=True)
class _Estimate:
    """Of a step with the drafter on a sequence: tokens it brings, levels, and milliseconds it gains before levels are
    paid. steps: that this rests on. ahead: such steps to come. reading_ms: to be paid first. worth: the highest price
    of a level at which it pays. idle: steps since it was asked."""

    tokens: float
    levels: float
    gross_ms: float
    steps: float
    ahead: float
    reading_ms: float
    worth: float
    idle: int


_UNKNOWN = DraftRecord(idle=1 << 30)


class DrafterGate:
    """One drafter's on and off, by sequence; the lookup drafters, which are asked together, have one as well.

    Per step it is known what the drafter's own tree yields on a sequence (tokens that come beyond the target's own),
    and how many levels and verified rows that takes. It is asked where the tokens are worth more than levels and rows,
    counted in milliseconds of the batch. Else trying it is weighed as an investment (value of information; the
    knowledge gradient of Frazier et al. 2008): what it is expected to gain on what is left of the sequence and on
    requests to come, if a trial shows that it pays, against what the trial costs. What is known gets old besides.

    prior: tokens, levels and rows of a step of a drafter that nobody has tried. looks: chance, by steps since it was
    asked last, that the texts have become such as it does well on. pools: what is known of all sequences at the start,
    by temperature.
    """

    def __init__(
        self,
        name: str,
        prior: tuple[float, float, float],
        looks: float,
        pools: Mapping[int, DraftRecord] = MappingProxyType({}),
    ) -> None:
        self.name, self._prior, self._looks = name, prior, looks
        self.pools = {bucket: self._doubted(pool, DOUBT_STEPS) for bucket, pool in pools.items()}

    def decide(
        self,
        sequences: Sequence[SequenceInputs],
        eligible: Sequence[bool],
        covered: Sequence[float],
        reading_ms: Sequence[float],
        prices: GatePrices,
    ) -> list[str]:
        """Per sequence `on`, `off`, `probe`, `forced`, or `` where it is not eligible.

        covered: chance that other drafters' trees hold the next token. reading_ms: what reading up to here costs.
        """
        decisions = [
            "" if not ok else "forced" if one.forced else "off" for one, ok in zip(sequences, eligible, strict=True)
        ]
        off = [i for i, decision in enumerate(decisions) if decision == "off"]
        if not off:
            return decisions
        forced, levels = decisions.count("forced"), prices.levels
        pools = {bucket: self.known(bucket) for bucket in {one.history.bucket for one in sequences}}
        found = {i: self._estimate(sequences[i], pools, covered[i], reading_ms[i], prices) for i in off}
        off.sort(key=lambda i: -found[i].worth)
        # The most sequences that all pay when they share the price of a level.
        on = max((n for n, i in enumerate(off, 1) if found[i].worth > levels[forced + n] / (forced + n)), default=0)
        for i in off[:on]:
            decisions[i] = "on"
        rest = [i for i in off[on:] if sequences[i].room > LEAST_ROOM]
        if rest:
            paid, n = levels[forced + on], len(rest)
            shared = (levels[forced + on + n] - paid) / n
            pool = pools[sequences[rest[0]].history.bucket]
            longest = max(rest, key=lambda i: found[i].idle)
            if n > 1 and self._all_worth_trying([found[i] for i in rest], pool, shared, prices):
                for i in rest:
                    decisions[i] = "probe"
            elif self._worth_trying(found[longest], pool, levels[forced + on + 1] - paid, shared, len(off), prices):
                decisions[longest] = "probe"
        return decisions

    def observe(self, one: SequenceInputs, tokens: float, levels: float, rows: float) -> None:
        """Its tree for a sequence yielded ``tokens``, took ``levels`` forwards, and ``rows`` of it were verified."""
        record = one.history.records.setdefault(self.name, DraftRecord())
        pool = self.pools.setdefault(one.history.bucket, self.known(one.history.bucket))
        record.add(KEEP, tokens, levels, rows)
        pool.add(POOL_KEEP, tokens, levels, rows)
        record.idle = pool.idle = 0

    def pause(self, sequences: Sequence[SequenceInputs], asked: Sequence[bool]) -> None:
        """A step is over: count those in which it was not asked."""
        buckets = {one.history.bucket for one in sequences}
        for one, was_asked in zip(sequences, asked, strict=True):
            if was_asked:
                buckets.discard(one.history.bucket)
                continue
            record = one.history.records.get(self.name)
            if record is not None:
                record.idle += 1
        for bucket in buckets:
            if bucket in self.pools:
                self.pools[bucket].idle += 1

    def known(self, bucket: int) -> DraftRecord:
        """What all sequences of a temperature showed, or what is thought of one that nobody tried."""
        found = self.pools.get(bucket)
        return self._doubted(DraftRecord(), PRIOR_STEPS) if found is None else found

    def _doubted(self, known: DraftRecord, steps: float) -> DraftRecord:
        """What is known, and so many ``steps`` of the prior."""
        tokens, levels, rows = self._prior
        return DraftRecord(
            known.steps + steps,
            known.tokens + steps * tokens,
            known.levels + steps * levels,
            known.rows + steps * rows,
        )

    def _estimate(
        self, one: SequenceInputs, pools: Mapping[int, DraftRecord], covered: float, reading_ms: float,
        prices: GatePrices,
    ) -> _Estimate:  # fmt: skip
        pool, record = pools[one.history.bucket], one.history.records.get(self.name, _UNKNOWN)
        share, steps = POOL_STEPS / pool.steps, POOL_STEPS + record.steps
        tokens = (share * pool.tokens + record.tokens) / steps
        levels = (share * pool.levels + record.levels) / steps
        rows = (share * pool.rows + record.rows) / steps
        ahead = max(1.0, min(one.room, max(LEAST_AHEAD, one.history.emitted)) / (1.0 + tokens))
        gross_ms = tokens * (1.0 - covered) * prices.token_ms - rows * prices.row_ms
        worth = (gross_ms - reading_ms / ahead) / levels
        return _Estimate(tokens, levels, gross_ms, steps, ahead, reading_ms, worth, record.idle)

    def _worth_trying(
        self, found: _Estimate, pool: DraftRecord, level_ms: float, shared: float, sequences: int, prices: GatePrices
    ) -> bool:
        """Whether a sequence should find out, for itself and for others. level_ms: what a level takes for this one.
        shared: its part of a level where all join in, which they will if it pays."""
        loss = max(0.0, found.levels * level_ms - found.gross_ms)
        # A sequence's difference to the others is thought to last as long as it is remembered.
        own = min(found.ahead, 1.0 / (1.0 - KEEP)) * _improvement(
            found.gross_ms - found.levels * shared, prices.token_ms * _moved(found.tokens, found.steps, TRIAL)
        )
        if own + self._future_gain(pool, found, shared, TRIAL, FUTURE, prices) > TRIAL * loss + found.reading_ms:
            return True
        # Or texts have become others since: each step without a look loses a share of what a drafter gains on average.
        tokens, levels, rows = self._prior
        price = (levels * shared + rows * prices.row_ms) / prices.token_ms
        gain = sequences * prices.token_ms * tokens * math.exp(-price / tokens)
        return pool.idle * self._looks * gain > loss + found.reading_ms

    def _all_worth_trying(
        self, found: Sequence[_Estimate], pool: DraftRecord, shared: float, prices: GatePrices
    ) -> bool:
        """Whether all these sequences should find out together, where one alone could not pay for a level."""
        n = len(found)
        loss = max(0.0, sum([one.levels * shared - one.gross_ms for one in found]))
        gain = self._future_gain(pool, found[0], shared, n * TRIAL, FUTURE + n * LEAST_AHEAD, prices)
        return gain > TRIAL * loss + sum([one.reading_ms for one in found])

    @staticmethod
    def _future_gain(
        pool: DraftRecord, found: _Estimate, shared: float, trial: float, tokens: float, prices: GatePrices
    ) -> float:
        """Milliseconds that knowing more of all sequences, by ``trial`` steps, gains in so many ``tokens`` to come."""
        mean = pool.tokens / pool.steps
        net_ms = mean * prices.token_ms - (pool.rows * prices.row_ms + pool.levels * shared) / pool.steps
        deviation = prices.token_ms * _moved(mean, pool.steps, trial)
        # That these sequences have been read already is of no use to requests to come.
        ahead = max(found.ahead, LEAST_AHEAD / (1.0 + mean))
        net_ms -= max(found.reading_ms / found.ahead, prices.reading_ms / ahead)
        return tokens / (1.0 + mean) * (_improvement(net_ms, deviation) - max(0.0, net_ms))


def _improvement(mean: float, deviation: float) -> float:
    """Expected gain of a choice that is only made if it turns out to gain: E[max(0, X)] of a normal X."""
    if deviation <= 0.0:
        return max(mean, 0.0)
    z = mean / deviation
    return 0.5 * mean * math.erfc(-z / math.sqrt(2.0)) + deviation * math.exp(-0.5 * z * z) / math.sqrt(2.0 * math.pi)


def _moved(tokens: float, steps: float, trial: float) -> float:
    """Standard deviation by which a trial of so many steps will move a mean of ``tokens`` that rests on ``steps``:
    tokens of a step spread as those of a chain that goes on with one chance."""
    return math.sqrt(tokens * (1.0 + tokens) / steps * trial / (steps + trial))
