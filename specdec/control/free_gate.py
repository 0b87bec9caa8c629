"""Decides which sequences the free drafters are asked for: they take no forward, but they do take time."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.control.sequence_control import FreeUse
from specdec.control.turn import Turn

FADE = 0.08  # weight of one turn in a sequence's average, and in that of the time asking takes
POOL_FADE = 0.01  # and in that of all sequences, from which new ones start
FIRST_GAIN = 0.5
FOUND = 0.3  # of a find after a pause: a text that repeats often goes on doing so, one lucky token does not
SHORTEST_PAUSE = 4  # turns; doubled by every asking that brings nothing
MOST_MISSES = 2


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
            self._ms += FADE * (ms / asked - self._ms)

    def observe(self, turn: Turn, asked: bool, gain: float) -> None:
        """A turn brought ``gain`` tokens, less the tokens its rows cost."""
        use = turn.control.free or self._use(turn)
        if not asked:
            use.idle += 1
            return
        bucket = turn.control.bucket
        self._pools[bucket] = self._pool(bucket) + POOL_FADE * (gain - self._pool(bucket))
        paused, use.idle = use.idle > 0, 0
        if gain > 0:
            use.gain = max(FOUND * gain, use.gain) if paused else use.gain + FADE * (gain - use.gain)
            use.misses = 0
        else:
            use.gain += FADE * (gain - use.gain)
            use.misses = min(use.misses + 1, MOST_MISSES) if paused else 0

    def _pool(self, bucket: int) -> float:
        return self._pools.get(bucket, FIRST_GAIN)

    def _use(self, turn: Turn) -> FreeUse:
        """What is known of this sequence; a new one starts from the average of its temperature."""
        if turn.control.free is None:
            turn.control.free = FreeUse(self._pool(turn.control.bucket))
        return turn.control.free

    def _asks(self, turn: Turn, use: FreeUse, price: float) -> bool:
        return turn.forced or turn.fresh or use.gain > price or use.idle + 1 >= SHORTEST_PAUSE << use.misses
