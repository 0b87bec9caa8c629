"""Running figures of an engine: emitted tokens per second, prefix-cache hits."""

from __future__ import annotations

import math

HALF_LIFE_S = 5.0


class Throughput:
    """Exponentially decayed token rate; ``hit_tokens`` of ``prompt_tokens`` came from the prefix cache."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.hit_tokens = 0
        self._mass = 0.0
        self._at: float | None = None

    def add(self, tokens: int, now: float) -> None:
        """``tokens`` were emitted at monotonic time ``now`` (seconds)."""
        self._decay(now)
        self._mass += tokens

    def prompt(self, tokens: int, cached: int) -> None:
        """A prompt entered, ``cached`` of its tokens from the cache."""
        self.prompt_tokens += tokens
        self.hit_tokens += cached

    def per_second(self, now: float) -> float:
        """The decayed rate; the integral of the decay is half-life / ln 2."""
        self._decay(now)
        return self._mass * math.log(2) / HALF_LIFE_S

    def _decay(self, now: float) -> None:
        if self._at is not None:
            self._mass *= 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._at = now
