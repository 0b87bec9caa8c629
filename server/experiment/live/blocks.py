"""Mode `switchback`: all requests of a block of time get one arm."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from server.auth.principal import Principal
from server.experiment.assignment import Split, bucket
from server.experiment.live.choice import Choice
from specdec.types import Request


class Blocks:
    """Block floor(t / block_s) of Unix time t has the arm of the key ``block:NUMBER``, each arm with chance 1/2: known
    beforehand to who has the salt, to nobody else, and the same after a restart.

    A request belongs to the block it came in. Within ``washout_s`` of a block's begin, and while the engine is being
    changed for the block (where ``waits_for_engine``), it is marked as `warm_up`.
    """

    def __init__(
        self,
        salt: str,
        arms: Iterable[str],
        block_s: float,
        washout_s: float,
        now: Callable[[], float],
        *,
        waits_for_engine: bool = False,
    ) -> None:
        self._salt, self._split = salt, Split(dict.fromkeys(arms, 1.0))
        self._block_s, self._washout_s, self._now = block_s, washout_s, now
        self._waits = waits_for_engine
        self._block = -1
        self._arm = ""
        self._settled_s = float("inf") if waits_for_engine else 0.0

    def arm_of(self, block: int) -> str:
        """Whose block it is."""
        arm = self._split.arm(bucket(self._salt, f"block:{block}"))
        assert arm is not None  # every bucket is somebody's
        return arm

    def block_at(self, now: float) -> int:
        """The block of a moment."""
        return int(now // self._block_s)

    def begin_of(self, block: int) -> float:
        """When a block begins."""
        return block * self._block_s

    def settled(self, block: int, now: float) -> None:
        """The engine is what ``block`` wants, from ``now`` on."""
        self._enter(block)
        self._settled_s = now

    def choose(self, principal: Principal, request: Request) -> Choice | None:
        """The arm of the block that runs."""
        now = self._now()
        block = self.block_at(now)
        if block != self._block:
            self._enter(block)
        begin = max(self.begin_of(block), self._settled_s)
        return Choice(self._arm, block=block, warm_up=now - begin < self._washout_s)

    def _enter(self, block: int) -> None:
        self._block, self._arm = block, self.arm_of(block)
        self._settled_s = float("inf") if self._waits else 0.0
