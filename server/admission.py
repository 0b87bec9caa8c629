"""Lets requests in: limits of keys, room in the queue, deadlines that can be met. The one way to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from server.auth.principal import Limits, Principal
from server.errors import (
    MIN_RETRY_S,
    LateError,
    RateLimitedError,
    TokenQueueFullError,
)
from server.request_stream import RequestStream
from specdec.config import ServerConfig
from specdec.core.fields import MAX_NAME
from specdec.core.types import Delta, EngineInfo, Finished, FinishReason, Request, RequestEvent, Started
from specdec.errors import FieldViolation, InvalidRequestError


class TokenBucket:
    """Fills at ``per_minute`` a minute and holds a minute's worth, full to begin with.

    It may be overdrawn, since what a call takes is known only afterwards: whoever comes next waits for that. Times are
    monotonic seconds and never run back.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self._per_minute = per_minute
        self._level, self._at = self._capacity, now

    @property
    def per_minute(self) -> float:
        """The rate."""
        return self._per_minute

    def change(self, per_minute: float, now: float) -> None:
        """Another rate from now on; what was overdrawn stays so."""
        self._fill(now)
        self._per_minute = per_minute
        self._level = min(self._level, self._capacity)

    def wait_s(self, now: float) -> float:
        """Seconds until something may be taken again; 0: now."""
        self._fill(now)
        return max(0.0, 1.0 - self._level) * 60.0 / self._per_minute

    def take(self, amount: float, now: float) -> None:
        """Use ``amount``, whether or not it is there."""
        self._fill(now)
        self._level -= amount

    @property
    def _capacity(self) -> float:
        return max(1.0, self._per_minute)

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self._per_minute / 60.0)
        self._at = now


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
        self.check_rate(now)

    def check_rate(self, now: float) -> None:
        """Whether requests may begin but for how many run.

        Raises:
            RateLimitedError: they may not.
        """
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


MEAN_WEIGHT = 0.2  # of the newest value


class RunningMean:
    """``value`` is None until something was added; of the first values it is the mean, until one has no more than
    ``weight``."""

    def __init__(self, weight: float = MEAN_WEIGHT) -> None:
        self.value: float | None = None
        self._weight, self._count = weight, 0

    def add(self, value: float) -> None:
        """The newest value."""
        self._count += 1
        old = 0.0 if self.value is None else self.value
        self.value = old + max(self._weight, 1 / self._count) * (value - old)


LEAST_SAMPLES = 5  # finished ones before anything is concluded
STALE_S = 15.0  # without news the machine may be as fast as ever
LEAST_PROMPT = 32  # computed tokens below which a prefill's time is that of a step, whatever its length
# Samples that were begun together end together: what lies between two ends is mostly nothing, and then a lot.
INTERVAL_WEIGHT = 1 / 32
_CUT_SHORT = (FinishReason.ABORTED, FinishReason.DEADLINE)


class Rates:
    """Running means over finished samples; unknown with few of them, or none lately. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._prefill = RunningMean()  # seconds per prompt token that was computed
        self._computed = RunningMean()  # share of prompt tokens that were, the others being cached
        self._decode = RunningMean()  # seconds per output token
        self._outputs = RunningMean()  # tokens of an answer
        self._interval = RunningMean(INTERVAL_WEIGHT)  # seconds between samples that end, while there is work
        self._samples = 0
        self._news_at = self._ended_at = 0.0

    def work_begins(self, now: float) -> None:
        """The engine was idle until now: the time before does not count as an interval."""
        self._ended_at = now

    def finished(self, event: Finished, now: float) -> None:
        """A sample ended."""
        usage, timings = event.usage, event.timings
        self._interval.add(max(0.0, now - self._ended_at))
        self._ended_at = now
        computed = usage.prompt_tokens - usage.cached_tokens
        if event.index == 0 and usage.output_tokens and not usage.resumed_tokens:
            self._computed.add(computed / max(1, usage.prompt_tokens))
            if computed >= LEAST_PROMPT:
                self._prefill.add(timings.prefill_ms / 1e3 / computed)
        said = usage.output_tokens - usage.resumed_tokens
        if said > 1:
            self._decode.add(timings.decode_ms / 1e3 / (said - 1))
        if event.reason in _CUT_SHORT:
            return
        if usage.output_tokens:
            self._outputs.add(usage.output_tokens)
        self._samples += 1
        self._news_at = now

    def known(self, now: float) -> bool:
        """Whether anything may be concluded."""
        return self._samples >= LEAST_SAMPLES and now - self._news_at < STALE_S

    @property
    def interval_s(self) -> float | None:
        """Seconds between samples that end while there is work; None: unknown."""
        return self._interval.value

    def prefill_s(self, tokens: int) -> float:
        """Seconds to compute prompts of so many tokens, of which as many are cached as lately; 0 while unknown."""
        return tokens * (self._computed.value or 0.0) * (self._prefill.value or 0.0)

    def decode_s(self, tokens: float) -> float:
        """Seconds for so many output tokens of one sample; 0 while unknown."""
        return tokens * (self._decode.value or 0.0)

    def likely_output(self, at_least: int, at_most: int | None) -> float:
        """How long an answer within these bounds is, going by the others."""
        likely = max(float(at_least), self._outputs.value or 0.0)
        return likely if at_most is None else min(likely, at_most)


@dataclass(frozen=True, slots=True)
class Ahead:
    """What the engine does before a request or beside it. ``waiting_tokens`` are of the prompts of
    ``waiting_sequences``, which go first; ``free_places`` of the batch (negative never)."""

    waiting_sequences: int
    waiting_tokens: int
    free_places: int


@dataclass(frozen=True, slots=True)
class Forecast:
    """Seconds until a request is first computed, and from then on until it is done."""

    wait_s: float
    own_s: float

    @property
    def total_s(self) -> float:
        """From now until it is done."""
        return self.wait_s + self.own_s


def forecast(request: Request, ahead: Ahead, rates: Rates) -> Forecast:
    """How ``request`` would fare at the measured rates.

    Places come free one per interval between ends; prompts ahead are computed one after the other; whichever of the
    two takes longer holds it up.
    """
    missing = max(0, ahead.waiting_sequences + request.sampling.n - ahead.free_places)
    for_place_s = missing * (rates.interval_s or 0.0)
    wait_s = max(for_place_s, rates.prefill_s(ahead.waiting_tokens))
    prefill_s = rates.prefill_s(request.tokens_to_read)
    stopping = request.stopping
    if stopping.ignore_eos and stopping.max_tokens is not None and not (stopping.stop or stopping.stop_token_ids):
        tokens = float(stopping.max_tokens)
    else:
        tokens = rates.likely_output(stopping.min_tokens, stopping.max_tokens)
    tokens -= request.tokens_to_read - len(request.prompt_ids)  # those it was resumed with
    return Forecast(wait_s, prefill_s + rates.decode_s(max(0.0, tokens - 1)))


_UNKNOWN_RETRY_S = 1.0
# Under overload every request that is let in is one that just fits: of half of them the forecast is too short. What is
# refused for it is not missed, for others wait to take the place.
LATE_MARGIN = 1.15


Submit = Callable[[Principal, Request, str], RequestStream]


class ExperimentTraffic(Protocol):
    """Running experiments, as admission knows them: they may give a request the options of its arms."""

    def admit(self, principal: Principal, request: Request, supersedes_key: str, submit: Submit) -> RequestStream:
        """Let ``request`` in through ``submit``; raises as that does."""


class EngineClientProtocol(Protocol):
    """What requests are let in to: `EngineClient` (`server.engine_client`), or a simulated engine."""

    @property
    def info(self) -> EngineInfo:
        """What the engine is; raises EngineDeadError while it is not known."""

    def generate(self, request: Request) -> RequestStream:
        """Begin ``request``; raises DuplicateRequestError, EngineDeadError."""

    def abort(self, request_id: str) -> bool:
        """End it; False where it is not in flight."""


class Admission:
    """Knows what the engine can not: whose a request is, what its key has used, what it supersedes. The engine queues,
    and bounds its queue by number; here it is bounded by tokens, and what can not be done in time is not begun.

    Belongs to one event loop. ``clock`` gives monotonic seconds. ``beside``: that of another model of the server,
    against which a key's limits count too. ``experiments``: those that run; None where none does.
    """

    def __init__(
        self,
        client: EngineClientProtocol,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        beside: Admission | None = None,
    ) -> None:
        self._client, self._clock = client, clock
        self._max_tokens, self._shed_late = config.max_queued_tokens, config.shed_late
        self._usage: dict[str, KeyUsage] = {} if beside is None else beside._usage
        self._streams: dict[RequestStream, KeyUsage] = {}
        self._by_key: dict[str, RequestStream] = {}
        self._rates = Rates()
        self.experiments: ExperimentTraffic | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Those of them of which the engine has said nothing yet."""
        return sum(not stream.started for stream in self._streams)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests of which the engine has said nothing yet."""
        return sum(stream.request.tokens_to_read for stream in self._streams if not stream.started)

    def admit(self, principal: Principal, request: Request, supersedes_key: str = "") -> RequestStream:
        """Give ``request`` to the engine in the name of ``principal``; to be used as ``async with``, or closed.

        ``supersedes_key``: ends the running request of the same tenant that has the same one.

        Raises:
            InvalidRequestError: ``supersedes_key`` is too long, or the caller asks for an arm of an experiment that it
                may not have.
            RateLimitedError: the key has used up a limit.
            QueueFullError: too many prompt tokens wait.
            LateError: it would not be done by its deadline.
            EngineDeadError: the engine is not ready.
            DuplicateRequestError: its id is in flight.
        """
        if self.experiments is not None:
            return self.experiments.admit(principal, request, supersedes_key, self._admit)
        return self._admit(principal, request, supersedes_key)

    def _admit(self, principal: Principal, request: Request, supersedes_key: str) -> RequestStream:
        if len(supersedes_key) > MAX_NAME:
            raise InvalidRequestError([FieldViolation("supersedes_key", f"at most {MAX_NAME} characters")])
        now, own = self._clock(), principal.scope_request(request)
        key = principal.scoped(supersedes_key) if supersedes_key else ""
        older = self._by_key.get(key) if key else None
        usage = self._usage_of(principal, now)
        leaving = int(older is not None and self._streams[older] is usage)
        usage.check(principal.limits, leaving, self._rates.interval_s or self.wait_s(older), now)
        self._check_room(own, older, now)
        self._check_time(own, older, now)
        stream = self._client.generate(own)
        if not self._streams:
            self._rates.work_begins(now)
        stream.listen(self, request.request_id, key, now)
        if older is not None:
            older.supersede(self._client.abort)
        self._streams[stream] = usage
        usage.begin(own.tokens_to_read, now)
        if key:
            self._by_key[key] = stream
        return stream

    def check_rate(self, principal: Principal) -> None:
        """Before work is put into what may become a request.

        Raises:
            RateLimitedError: the key has used up a limit.
        """
        now = self._clock()
        self._usage_of(principal, now).check_rate(now)

    def abort(self, principal: Principal, request_id: str) -> bool:
        """End a request of the principal's tenant: its reader gets Finished(ABORTED) per open sample. False when it is
        not in flight."""
        return self._client.abort(principal.scoped(request_id))

    def on_event(self, stream: RequestStream, event: RequestEvent) -> None:
        """The reader of ``stream`` got ``event``."""
        now = self._clock()
        if isinstance(event, Started):
            stream.started = True
        elif isinstance(event, Delta):
            self._streams[stream].spend(len(event.token_ids), now)
        elif isinstance(event, Finished):
            self._rates.finished(event, now)

    def ended(self, stream: RequestStream) -> None:
        """``stream`` takes no room any more; a prompt that was not even begun is not counted."""
        usage = self._streams.pop(stream)
        usage.end()
        if not stream.started:
            usage.spend(-stream.request.tokens_to_read, self._clock())
        self._by_key.pop(stream.supersedes_key, None)

    @property
    def forecast_s(self) -> float:
        """Seconds until a request that came now would begin, as `wait_s`; 0: at once."""
        return self._forecast_s(None)

    def wait_s(self, but: RequestStream | None = None) -> float:
        """Seconds until a request that came now would begin, were ``but`` not there, to tell to who has to come again.
        Before the first answers nothing else is known than that what has waited for long may wait for as long again."""
        return self._forecast_s(but) or _UNKNOWN_RETRY_S

    def _forecast_s(self, but: RequestStream | None) -> float:
        now = self._clock()
        others = [stream for stream in self._streams if stream is not but]
        waiting = [stream for stream in others if not stream.started]
        running = sum(stream.samples_left for stream in others if stream.started)
        missing = sum(stream.samples_left for stream in waiting) + 1 - max(0, self._client.info.max_batch - running)
        waited_s = max((now - stream.admitted_s for stream in waiting), default=0.0)
        tokens = sum(stream.request.tokens_to_read for stream in waiting)
        measured_s = max(max(0, missing) * (self._rates.interval_s or 0.0), self._rates.prefill_s(tokens))
        return measured_s if self._rates.known(now) else max(waited_s, measured_s)

    def _usage_of(self, principal: Principal, now: float) -> KeyUsage:
        usage = self._usage.get(principal.name)
        if usage is None:
            usage = self._usage[principal.name] = KeyUsage(principal.name)
        usage.apply(principal.limits, now)
        return usage

    def _check_room(self, request: Request, older: RequestStream | None, now: float) -> None:
        """A prompt of any length may wait alone."""
        waiting = self.waiting_tokens
        if older is not None and not older.started:
            waiting -= older.request.tokens_to_read
        excess = waiting + request.tokens_to_read - self._max_tokens
        if self._max_tokens and waiting and excess > 0:
            room_s = self._rates.prefill_s(excess)
            raise TokenQueueFullError(
                self._max_tokens, waiting, room_s if self._rates.known(now) else max(room_s, self.wait_s(older))
            )

    def _check_time(self, request: Request, older: RequestStream | None, now: float) -> None:
        """An idle engine takes whatever comes: that is how its rates become known again."""
        if not self._shed_late or request.deadline_s is None or not self._rates.known(now):
            return
        others = [stream for stream in self._streams if stream is not older]
        if not others:
            return
        ahead = [t.request for t in others if not t.started and t.request.priority >= request.priority]
        running = sum(stream.samples_left for stream in others if stream.started)
        expected = forecast(
            request,
            Ahead(
                sum(waiting.sampling.n for waiting in ahead),
                sum(waiting.tokens_to_read for waiting in ahead),
                max(0, self._client.info.max_batch - running),
            ),
            self._rates,
        )
        needed_s = LATE_MARGIN * expected.total_s
        if needed_s > request.deadline_s:
            # Room by then: as much of the wait as is too much for the deadline, or all of it where none would do.
            too_much = needed_s - request.deadline_s
            raise LateError(needed_s, request.deadline_s, max(MIN_RETRY_S, min(too_much, expected.wait_s)))
