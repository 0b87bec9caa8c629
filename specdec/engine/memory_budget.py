"""What an engine will need of memory, and what there is."""

from __future__ import annotations

from collections.abc import Sequence

from specdec.engine.memory_need import MemoryNeed
from specdec.errors import ModelError

_GIB = 1 << 30


class MemoryBudget:
    """``needs`` against ``available`` bytes. ``kv_token_bytes``: what one token of the KV caches takes, and
    ``kv_tokens`` how many are wanted; fewer than ``least_kv_tokens`` would not serve the context that was asked for.
    """

    def __init__(
        self,
        needs: Sequence[MemoryNeed],
        available: int,
        *,
        kv_token_bytes: int = 0,
        kv_tokens: int = 0,
        least_kv_tokens: int = 0,
    ) -> None:
        self.needs, self.available = tuple(needs), max(0, available)
        self._kv_token_bytes, self._kv_tokens, self._least = kv_token_bytes, kv_tokens, least_kv_tokens

    @property
    def needed(self) -> int:
        """Bytes needed to serve."""
        return sum(need.nbytes for need in self.needs if not need.later)

    @property
    def later(self) -> int:
        """Bytes that what is served may come to take on top."""
        return sum(need.nbytes for need in self.needs if need.later)

    @property
    def fits(self) -> bool:
        """Whether there is enough to serve."""
        return self.needed <= self.available

    def lines(self) -> list[str]:
        """A table for people: the largest first."""
        ordered = sorted(self.needs, key=lambda need: (need.later, -need.nbytes))
        width = max((len(need.what) for need in ordered), default=0)
        rows = [
            f"{need.what:{width}}  {need.nbytes / _GIB:6.2f} GiB{' at most' if need.later else ''}"
            f"{'  ' + ', '.join(need.options) if need.options else ''}"
            for need in ordered
        ]
        return [*rows, f"{'together':{width}}  {self.needed / _GIB:6.2f} GiB of {self.available / _GIB:.2f} available"]

    def check(self) -> None:
        """Refuse what does not fit.

        Raises:
            ModelError: it does not; tells what needs how much, and what to change.
        """
        if self.fits:
            return
        missing = (self.needed - self.available) / _GIB
        raise ModelError(
            f"memory: {missing:.2f} GiB too little; {self._way_out()}. What is needed:\n  " + "\n  ".join(self.lines())
        )

    def _way_out(self) -> str:
        if self._kv_token_bytes:
            others = self.needed - self._kv_tokens * self._kv_token_bytes
            fitting = (self.available - others) // self._kv_token_bytes // 64 * 64
            if fitting >= self._least:
                return f"lower engine.kv_tokens from {self._kv_tokens} to {fitting}"
        options = {option: need.nbytes for need in reversed(self.needs) if not need.later for option in need.options}
        best = sorted(options, key=lambda option: -options[option])[:4]
        return f"choose less or smaller for {', '.join(best)}, or free some memory" if best else "free some memory"
