"""What one key has used of its limits."""

from __future__ import annotations

from server.admission.admission_errors import RateLimitedError
from server.admission.token_bucket import TokenBucket
from server.auth.limits import Limits


class KeyUsage:
    """Limits may change between calls; what was used counts against the new ones."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        self._running = 0

    def apply(self, limits: Limits, now: float) -> None:
        """The limits in force from now on."""
        self._requests = _bucket(self._requests, limits.requests_per_minute, now)
        self._tokens = _bucket(self._tokens, limits.tokens_per_minute, now)

    def check(self, limits: Limits, leaving: int, retry_s: float, now: float) -> None:
        """Whether one more request may begin; nothing is taken.

        leaving: running requests that it takes the place of. retry_s: when one of those that run may have ended.

        Raises:
            RateLimitedError: it may not.
        """
        most = limits.max_concurrent
        if most is not None and self._running - leaving >= most:
            raise RateLimitedError(self._name, "max_concurrent", most, retry_s)
        for bucket, limit in ((self._requests, "requests_per_minute"), (self._tokens, "tokens_per_minute")):
            wait_s = 0.0 if bucket is None else bucket.wait_s(now)
            if bucket is not None and wait_s > 0:
                raise RateLimitedError(self._name, limit, bucket.per_minute, wait_s)

    def begin(self, prompt_tokens: int, now: float) -> None:
        """A request begins."""
        self._running += 1
        if self._requests is not None:
            self._requests.take(1, now)
        self.spend(prompt_tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        """Tokens came out, or went in; fewer than none: they did not after all."""
        if self._tokens is not None:
            self._tokens.take(tokens, now)

    def end(self) -> None:
        """A request ended."""
        self._running -= 1


def _bucket(old: TokenBucket | None, per_minute: float | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if old is None:
        return TokenBucket(per_minute, now)
    if old.per_minute != per_minute:
        old.change(per_minute, now)
    return old
