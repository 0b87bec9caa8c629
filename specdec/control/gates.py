"""Who is asked to draft, and how deep: lookup drafters, model-based drafters, and when they rest."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specdec.control.costs import CostTable
from specdec.control.state import FreeUse, Ratio, Turn, Usage

DEAREST = 0.95  # no price, however high, stops a level whose parents are certain to be reached


@dataclass(frozen=True, slots=True)
class Pace:
    """cost: of one level by sequences. rate: tokens per millisecond that the batch earns otherwise. row_ms: price of
    verifying a node. follow: share of reached nodes below which the drafter then holds the target's choice."""

    cost: CostTable
    rate: float
    row_ms: float
    follow: float

    def floor(self, batch: int) -> float:
        """Log of the least chance of being reached at which a node is worth its share of a level for ``batch``."""
        if not self.cost.known:
            return -math.inf
        price = self.rate * (self.cost.ms(batch) / batch + self.row_ms) / self.follow
        return math.log(min(DEAREST, max(price, 1e-3)))

    def keep(self, reached: Sequence[float], others: int = 0) -> int:
        """How many of the growing trees go on for one level more. reached: the chance that each one's best leaf is
        reached, falling. others: trees that go on in any case and share the price."""
        if not self.cost.known:
            return len(reached)
        best, kept, tokens = 0.0, 0, 0.0
        paid = self.cost.ms(others) if others else 0.0
        for n, chance in enumerate(reached, 1):
            tokens += chance * self.follow
            worth = tokens - self.rate * (self.cost.ms(others + n) - paid + n * self.row_ms)
            if worth > best:
                best, kept = worth, n
        return kept


LOOKUP_FADE = 0.08  # weight of one turn in a sequence's average, and in that of the time asking takes
LOOKUP_POOL_FADE = 0.01  # and in that of all sequences, from which new ones start
LOOKUP_FIRST_GAIN = 0.5
FOUND = 0.3  # of a find after a pause: a text that repeats often goes on doing so, one lucky token does not
SHORTEST_PAUSE = 4  # turns; doubled by every asking that brings nothing
LOOKUP_MOST_MISSES = 2


class FreeGate:
    """The free drafters' on and off, by sequence.

    A fraction of a millisecond each, for every sequence of a batch, is a percent of a step; where a text repeats
    nothing it buys nothing. A sequence is asked for while what it gains in tokens exceeds that time, else now and then.
    """

    def __init__(self) -> None:
        self._ms = 0.0  # per turn asked for
        self._pools: dict[int, float] = {}  # gain per turn asked for, by temperature

    def decide(self, turns: Sequence[Turn], token_ms: float) -> list[bool]:
        """Per turn whether the free drafters are asked. token_ms: what a token of this batch takes."""
        price = self._ms / token_ms
        return [self._asks(turn, turn.control.free or self._use(turn), price) for turn in turns]

    def observe_ms(self, ms: float, asked: int) -> None:
        """Asking for ``asked`` turns took ``ms``."""
        if asked:
            self._ms += LOOKUP_FADE * (ms / asked - self._ms)

    def observe(self, turn: Turn, asked: bool, gain: float) -> None:
        """A turn brought ``gain`` tokens, less the tokens its rows cost."""
        use = turn.control.free or self._use(turn)
        if not asked:
            use.idle += 1
            return
        bucket = turn.control.bucket
        self._pools[bucket] = self._pool(bucket) + LOOKUP_POOL_FADE * (gain - self._pool(bucket))
        paused, use.idle = use.idle > 0, 0
        if gain > 0:
            use.gain = max(FOUND * gain, use.gain) if paused else use.gain + LOOKUP_FADE * (gain - use.gain)
            use.misses = 0
        else:
            use.gain += LOOKUP_FADE * (gain - use.gain)
            use.misses = min(use.misses + 1, LOOKUP_MOST_MISSES) if paused else 0

    def _pool(self, bucket: int) -> float:
        return self._pools.get(bucket, LOOKUP_FIRST_GAIN)

    def _use(self, turn: Turn) -> FreeUse:
        """What is known of this sequence; a new one starts from the average of its temperature."""
        if turn.control.free is None:
            turn.control.free = FreeUse(self._pool(turn.control.bucket))
        return turn.control.free

    def _asks(self, turn: Turn, use: FreeUse, price: float) -> bool:
        return turn.forced or turn.fresh or use.gain > price or use.idle + 1 >= SHORTEST_PAUSE << use.misses


STAYS, ENTERS = 0.12, 0.05  # of the gain: one that is on stays on a little below its price, one that is off needs more
FADE = 0.05  # weight of one turn in a sequence's averages: a run of bad luck must not switch a drafter off
POOL_FADE = 0.03  # and in the drafter's own, from which new sequences start
FORGET_EVERY, IDLE_FADE = 8, 0.15  # steps, and what is forgotten of a sequence in them, while it is not asked for
FIRST_FOLLOW, FOLLOW_FADE = 0.7, 0.02
LEAST_FOLLOW = 0.2
LEAST_SLOWER, MOST_SLOWER = 0.5, 2.0
SLOWNESS_FADE = 0.15  # as quickly as a table follows its forwards
HORIZON = 24  # tokens over which reading a prompt must pay, or as many as came already: an answer may end any time
PROBE_SHARE = 0.015  # of the time, at most, that probes take: of one sequence; of n, what they may win falls with n
PROBE_LEVELS = 2.0  # what a probe takes; more only when it finds something
MOST_CREDIT = 100.0  # plain steps' worth of time that probes may save up for
FIRST_PROBE = 4  # steps of a new sequence until it is looked at: texts differ, and the average of others says little
FIRST_CREDIT = 1.0  # plain steps' worth of probes that a new engine may make at once: it knows nothing yet
LONGEST_PAUSE = 4  # probes back off to this many times the interval
MOST_MISSES = 8
FIRST_GAIN, FIRST_LEVELS = 1.5, 3.0
UNTRIED = 0.75  # of what other texts gained is counted on where a long text would have to be read first to find out
PRIOR_TURNS = 8  # that what an average starts from weighs as much as
SHORT_BACKLOG = 16  # what an accepted run or a pause leaves behind rides along with the first level
CHUNK = 192  # rows of a prompt read in one forward


class CostlyGate:
    """One drafter's on and off.

    For each sequence it keeps how many tokens the drafter's own tree yields per turn and how many levels (forwards)
    that takes. Where the free drafters' tree is strong already, only the rest counts: gain x (1 - chance that their
    first level holds the target's choice). A level's price is shared by the sequences that are asked together.
    """

    def __init__(self, name: str, cost: CostTable, probe_every: int) -> None:
        self.name, self.cost = name, cost
        self._probe_every = probe_every
        self._pools: dict[int, Usage] = {}
        self._follow = FIRST_FOLLOW
        self._credit = FIRST_CREDIT
        # What askings take over what their levels and long texts should: texts of several tokens ride along as well.
        self._dearer = Ratio(prior=200.0, least=1.0, most=2.0)
        self._slowness = self._slowness_then = 1.0  # the target's, now and when this drafter was last asked

    def follow(self, slowness: float) -> None:
        """The target's forwards take ``slowness`` times as long as at start: one that is not asked has got as slow."""
        self._slowness = slowness

    @property
    def _times(self) -> float:
        """What a level takes now, over what its table says."""
        return self._dearer.value * max(LEAST_SLOWER, min(MOST_SLOWER, self._slowness / self._slowness_then))

    def usage(self, turn: Turn) -> Usage:
        """What is known of the drafter on this sequence; a new one starts from the average of its temperature."""
        found = turn.control.usage.get(self.name)
        if found is None:
            pool = self._pool(turn.control.bucket)
            idle = max(0, self._probe_every - FIRST_PROBE)
            found = turn.control.usage[self.name] = Usage(pool.gain, pool.levels, pool.rows, idle=idle)
        return found

    def decide(
        self, turns: Sequence[Turn], covered: Sequence[float], eligible: Sequence[bool], rate: float, row_ms: float,
        plain_ms: float,
    ) -> list[str]:  # fmt: skip
        """Per turn `on`, `off`, `probe`, `forced`, or `` where it is not eligible.

        covered: chance that the other drafters' trees hold the target's next token. rate: tokens per millisecond that
        a step of this batch earns without this drafter. row_ms: price of verifying one row.
        """
        usages = [turn.control.usage.get(self.name) or self.usage(turn) for turn in turns]
        decisions = [
            "" if not ok else "forced" if turn.forced else "off" for turn, ok in zip(turns, eligible, strict=True)
        ]
        for i in self._paying(turns, usages, covered, decisions, rate, row_ms):
            decisions[i] = "on"
        earned = PROBE_SHARE / math.sqrt(max(len(turns), 1))
        self._credit = min(self._credit + earned, PROBE_SHARE * MOST_CREDIT)
        least = self.cost.ms(1) / plain_ms - 1e-9
        for i, (usage, decision) in enumerate(zip(usages, decisions, strict=True)):
            if decision == "off":
                # Most are not due, or nothing is saved up: seen at a glance.
                due = self._credit >= least and usage.idle + 1 >= self._probe_every
                if due and self._probes(turns[i], usage, plain_ms):
                    decisions[i] = "probe"
                    usage.on, usage.idle = False, 0
                else:
                    usage.on = False
                    usage.idle += 1
                    if not usage.idle % FORGET_EVERY:
                        self._forget(usage, turns[i])
            elif decision:
                usage.on, usage.idle = True, 0
        return decisions

    def pace(self, rate: float, row_ms: float) -> Pace:
        """How deep to go in this step."""
        return Pace(self.cost, rate, row_ms, max(LEAST_FOLLOW, self._follow))

    def observe(self, turn: Turn, gain: int, levels: int, rows: int, probe: bool = False) -> None:
        """The drafter's own tree yielded ``gain`` tokens, took ``levels`` forwards, and ``rows`` of it were verified;
        on a ``probe``, would have yielded, and would have been."""
        usage = self.usage(turn)
        fade = 2.5 * FADE if probe else FADE
        for record, least in ((usage, fade), (self._pool(turn.control.bucket), POOL_FADE)):
            record.turns += 1
            weight = max(least, 1.0 / (PRIOR_TURNS + record.turns))
            record.gain += weight * (gain - record.gain)
            record.levels += weight * (levels - record.levels)
            record.rows += weight * (rows - record.rows)
        tried = min(gain + 1, levels)  # levels whose parent was reached
        self._follow += FOLLOW_FADE * (gain - self._follow * tried)
        if probe:
            usage.misses = 0 if gain > usage.price * levels else min(usage.misses + 1, MOST_MISSES)

    def observe_ms(self, asked: Sequence[Turn], levels: int, ms: float) -> None:
        """Asking for these turns together took ``ms`` for ``levels`` forwards, reading what they had not seen."""
        if asked and levels and self.cost.known:
            reading = sum(self._backlog_ms(turn) for turn in asked)
            self._dearer.add(levels * self.cost.ms(len(asked)) + reading, ms)
            self._slowness_then += SLOWNESS_FADE * (self._slowness - self._slowness_then)

    def _forget(self, usage: Usage, turn: Turn) -> None:
        """What it once brought here says less from step to step, and what it brings elsewhere says more."""
        pool = self._pool(turn.control.bucket)
        usage.gain += IDLE_FADE * (pool.gain - usage.gain)
        usage.levels += IDLE_FADE * (pool.levels - usage.levels)
        usage.rows += IDLE_FADE * (pool.rows - usage.rows)

    def _pool(self, bucket: int) -> Usage:
        return self._pools.setdefault(bucket, Usage(FIRST_GAIN, FIRST_LEVELS, FIRST_LEVELS))

    def _paying(
        self, turns: Sequence[Turn], usages: Sequence[Usage], covered: Sequence[float], decisions: Sequence[str],
        rate: float, row_ms: float,
    ) -> list[int]:  # fmt: skip
        """The largest set of turns that all pay when they share the price of each level."""
        open_turns = [i for i, decision in enumerate(decisions) if decision == "off"]
        if not self.cost.known or not open_turns:
            return open_turns  # asking is the way to learn what it costs
        forced, times = decisions.count("forced"), self._times
        first = min(forced + 1, self.cost.largest)  # beyond what was measured none gets dearer
        levels = self.cost.span(first, len(open_turns) - 1)
        levels += levels[-1:] * (len(open_turns) - len(levels))
        prices = [times * ms / (forced + n) for n, ms in enumerate(levels, 1)]
        tokens = (prices[-1] + row_ms) * rate
        worth = []
        for i in open_turns:
            usage = usages[i]
            usage.price = tokens
            worth.append((self._worth(turns[i], usage, covered[i], rate, row_ms, times), -i))
        worth.sort(reverse=True)
        paying = max((n for n, price in enumerate(prices, 1) if worth[n - 1][0] > price), default=0)
        return [-i for _, i in worth[:paying]]

    def _worth(self, turn: Turn, usage: Usage, covered: float, rate: float, row_ms: float, times: float) -> float:
        """The highest price of a level (milliseconds) at which the drafter still pays on this turn."""
        gain, reading_ms = usage.gain, 0.0
        if turn.backlog.get(self.name, 0) > SHORT_BACKLOG:
            if usage.turns < PRIOR_TURNS:
                gain *= UNTRIED
            ahead = min(turn.room, max(HORIZON, turn.control.emitted))
            reading_ms = times * self._backlog_ms(turn) / max(ahead / (1.0 + gain), 1.0)
        margin = 1.0 - STAYS if usage.on else 1.0 + ENTERS
        gained_ms = gain * (1.0 - covered) / rate - reading_ms
        return (gained_ms / margin - usage.rows * row_ms) / usage.levels

    def _backlog_ms(self, turn: Turn) -> float:
        """What reading what it has not seen costs beyond an ordinary first level."""
        backlog = turn.backlog.get(self.name, 0)
        if backlog <= SHORT_BACKLOG:
            return 0.0
        return self.cost.ms(min(backlog, CHUNK)) * max(1.0, backlog / CHUNK) - self.cost.ms(1)

    def _probes(self, turn: Turn, usage: Usage, plain_ms: float) -> bool:
        """Whether it is time to look again, and there is time saved up for it."""
        pause = self._probe_every * min(LONGEST_PAUSE, 1 << usage.misses)
        if usage.idle + 1 < pause or turn.room <= 8:
            return False
        price = (self._backlog_ms(turn) + max(1.0, min(usage.levels, PROBE_LEVELS)) * self.cost.ms(1)) / plain_ms
        if self._credit < price - 1e-9:
            return False
        self._credit -= price
        return True


LIMIT = 6.0  # plain steps of loss that one sequence may run up; of n, whose luck evens out, the root of n times less
FIRST_PAUSE, BALANCE_LONGEST_PAUSE = 32, 512  # steps; doubled by every loss that follows without a win between


class Balance:
    """What steps with a costly drafter won or lost on plain decoding, added up (a CUSUM; Page 1954).

    The gate adds up estimates, each somewhat wrong; where drafting about breaks even, the sum may be wrong too. This
    compares what the tokens took with what they would have taken, for batches of about ``sequences``. It lets the
    drafters rest once the loss exceeds the limit, and remembers no larger win than that.
    """

    def __init__(self, sequences: int) -> None:
        self._limit = LIMIT / math.sqrt(sequences)
        self._won = 0.0
        self._pause, self._next = 0, FIRST_PAUSE

    @property
    def rests(self) -> bool:
        """Whether costly drafters are left out."""
        return self._pause > 0

    def observe(self, gain: float | None) -> None:
        """A step gained so many plain steps' time; None: no costly drafter was on, or the step says nothing."""
        if self._pause:
            self._pause -= 1
        elif gain is not None:
            self._won = min(self._won + gain, self._limit)
            if self._won < -self._limit:
                self._won, self._pause = 0.0, self._next
                self._next = min(2 * self._next, BALANCE_LONGEST_PAUSE)
            elif self._won >= self._limit:
                self._next = FIRST_PAUSE
