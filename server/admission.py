"""Admission control: limits of keys, room in the queue, deadlines that can be met; runs the requests of a call."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

from server.auth.principal import Limits, Principal, current_caller
from server.errors import LateError, RateLimitedError, TokenQueueFullError
from server.observe.records import current_call
from server.request_stream import RequestStream
from specdec.config import ServerConfig
from specdec.core.fields import MAX_NAME
from specdec.core.types import Delta, Finished, FinishReason, Request, RequestEvent
from specdec.errors import InvalidRequestError, QueueFullError
from specdec.models.next_edit import WindowReader

if TYPE_CHECKING:
    from server.engine_client import EngineClient


class TokenBucket:
    """A bucket that refills at ``per_minute`` and holds one minute's worth; it starts full.

    It may be overdrawn, because a call's cost is known only afterwards; later calls wait until it is refilled. Times
    are monotonic seconds.
    """

    def __init__(self, per_minute: float, now: float) -> None:
        self.per_minute = per_minute
        self._level, self._at = self._capacity, now

    def change(self, per_minute: float, now: float) -> None:
        """Change the rate; an overdraft remains."""
        self._fill(now)
        self.per_minute = per_minute

    def wait_s(self, now: float) -> float:
        """Seconds until something may be taken again."""
        self._fill(now)
        return max(0.0, 1.0 - self._level) * 60.0 / self.per_minute

    def take(self, amount: float, now: float) -> None:
        """Take ``amount``, even if the bucket holds less."""
        self._fill(now)
        self._level -= amount

    @property
    def _capacity(self) -> float:
        return max(1.0, self.per_minute)

    def _fill(self, now: float) -> None:
        self._level = min(self._capacity, self._level + (now - self._at) * self.per_minute / 60.0)
        self._at = now


class KeyUsage:
    """One key's use of its limits. Limits may change between calls; past use counts against the new ones."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._buckets: dict[str, TokenBucket] = {}  # by the names of the limits that are set
        self._running = 0

    def apply(self, limits: Limits, now: float) -> None:
        """Enforce ``limits`` from now on."""
        for limit in ("requests_per_minute", "tokens_per_minute"):
            per_minute: float | None = getattr(limits, limit)
            if per_minute is None:
                self._buckets.pop(limit, None)
            else:
                self._buckets.setdefault(limit, TokenBucket(per_minute, now)).change(per_minute, now)

    def check(self, limits: Limits, leaving: int, retry_s: float, now: float, *, later: bool) -> None:
        """Check that one more request may start; takes nothing.

        leaving: running requests that it supersedes. retry_s: seconds until a running request may have ended. later: a
        request of its call has begun, so that it counts against the rates but is not refused for them: such a call
        could never succeed.

        Raises:
            RateLimitedError: a limit is reached.
        """
        most = limits.max_concurrent
        if most is not None and self._running - leaving >= most:
            raise RateLimitedError(self._name, "max_concurrent", most, retry_s)
        if not later:
            self.check_rate(now)

    def check_rate(self, now: float) -> None:
        """As `check`, without the limit on concurrent requests.

        Raises:
            RateLimitedError: a limit is reached.
        """
        for limit, bucket in sorted(self._buckets.items()):
            if (wait_s := bucket.wait_s(now)) > 0:
                raise RateLimitedError(self._name, limit, bucket.per_minute, wait_s)

    def begin(self, prompt_tokens: int, now: float) -> None:
        """Count a request that starts."""
        self._running += 1
        self._take("requests_per_minute", 1, now)
        self.spend(prompt_tokens, now)

    def spend(self, tokens: int, now: float) -> None:
        """Count ``tokens``; a negative number gives tokens back."""
        self._take("tokens_per_minute", tokens, now)

    def end(self) -> None:
        """Count a request that ended."""
        self._running -= 1

    def _take(self, limit: str, amount: int, now: float) -> None:
        if limit in self._buckets:
            self._buckets[limit].take(amount, now)


MEAN_WEIGHT = 0.2  # of the newest value in a running mean


class RunningMean:
    """An exponential mean whose newest value counts ``weight``; the plain mean until there are 1 / ``weight`` values.

    ``value`` is None until a value was added.
    """

    def __init__(self, weight: float = MEAN_WEIGHT) -> None:
        self.value: float | None = None
        self._weight, self._count = weight, 0

    def add(self, value: float) -> None:
        """Add a value."""
        self._count += 1
        old = 0.0 if self.value is None else self.value
        self.value = old + max(self._weight, 1 / self._count) * (value - old)


LEAST_SAMPLES = 5  # ended samples before the rates are used
STALE_S = 15.0  # seconds without an ended sample after which the rates are not used: the machine may be faster now
LEAST_PROMPT = 32  # computed tokens; a shorter prefill takes as long as a step, whatever its length
# Samples that start together end together, so intervals between ends vary widely and need a long mean.
INTERVAL_WEIGHT = 1 / 32
_CUT_SHORT = (FinishReason.ABORTED, FinishReason.DEADLINE)


class Rates:
    """Running means over samples that the engine started and that ended, complete or not: under overload, none may be
    complete before the rates are known. Times are monotonic seconds."""

    def __init__(self) -> None:
        self._prefill = RunningMean()  # seconds per prompt token that was computed
        self._computed = RunningMean()  # share of prompt tokens that were computed; the others were cached
        self._decode = RunningMean()  # seconds per output token
        self._outputs = RunningMean()  # output tokens of a sample
        self._interval = RunningMean(INTERVAL_WEIGHT)  # seconds between ends of samples, while there is work
        self._samples = 0
        self._news_at = self._ended_at = 0.0

    def work_begins(self, now: float) -> None:
        """Start the next interval now, because the engine was idle."""
        self._ended_at = now

    def finished(self, event: Finished, now: float) -> None:
        """Add the figures of a sample that ended."""
        usage, timings = event.usage, event.timings
        self._interval.add(max(0.0, now - self._ended_at))
        self._ended_at = now
        computed = usage.prompt_tokens - usage.cached_tokens
        if event.index == 0 and usage.output_tokens and not usage.resumed_tokens:
            self._computed.add(computed / max(1, usage.prompt_tokens))
            if computed >= LEAST_PROMPT:
                self._prefill.add(timings.prefill_ms / 1e3 / computed)
        generated = usage.output_tokens - usage.resumed_tokens
        if generated > 1:
            self._decode.add(timings.decode_ms / 1e3 / (generated - 1))
        # The length of an answer that was cut short is only a lower bound.
        if usage.output_tokens and (
            event.reason not in _CUT_SHORT or usage.output_tokens > self.likely_output(0, None)
        ):
            self._outputs.add(usage.output_tokens)
        self._samples += 1
        self._news_at = now

    def known(self, now: float) -> bool:
        """Whether there are enough recent samples to use the rates."""
        return self._samples >= LEAST_SAMPLES and now - self._news_at < STALE_S

    @property
    def interval_s(self) -> float | None:
        """Seconds between ends of samples while there is work; None: unknown."""
        return self._interval.value

    def prefill_s(self, tokens: float) -> float:
        """Seconds to compute prompts of ``tokens`` tokens at the recent cache hit rate; 0 while unknown."""
        return tokens * (self._computed.value or 0.0) * (self._prefill.value or 0.0)

    def decode_s(self, tokens: float) -> float:
        """Seconds to decode ``tokens`` output tokens of one sample; 0 while unknown."""
        return tokens * (self._decode.value or 0.0)

    def own_s(self, request: Request) -> float:
        """Seconds from the start of ``request`` to its end."""
        stopping = request.stopping
        if stopping.ignore_eos and stopping.max_tokens is not None and not (stopping.stop or stopping.stop_token_ids):
            tokens = float(stopping.max_tokens)
        else:
            tokens = self.likely_output(stopping.min_tokens, stopping.max_tokens)
        tokens -= request.tokens_to_read - len(request.prompt_ids)  # minus resumed tokens
        return self.prefill_s(request.tokens_to_read) + self.decode_s(max(0.0, tokens - 1))

    def likely_output(self, at_least: int, at_most: int | None) -> float:
        """Expected output tokens: the mean of recent samples, within these bounds."""
        likely = max(float(at_least), self._outputs.value or 0.0)
        return likely if at_most is None else min(likely, at_most)


_UNKNOWN_RETRY_S = 1.0
# Factor on the forecast. Under overload the admitted requests are those that just fit, and the forecast of half of them
# is too short. Refusing more costs no throughput, because other requests wait for the place.
LATE_MARGIN = 1.15


Submit = Callable[[Principal, Request, str], RequestStream]


class ExperimentTraffic(Protocol):
    """Running experiments, which may give a request the options of its arms."""

    def admit(
        self, principal: Principal, request: Request, supersedes_key: str, submit: Submit, *, asks_again: bool = False
    ) -> RequestStream:
        """Submit ``request`` with the options of its arms; raises as ``submit``. asks_again: see `Admission.admit`."""


class Admission:
    """Admits requests to the engine by their key's limits, the prompt tokens that wait, and their deadline.

    The engine queues requests and bounds their number; it knows no keys, no superseding and no forecasts. Belongs to
    one event loop.
    """

    def __init__(
        self,
        client: EngineClient,
        config: ServerConfig,
        clock: Callable[[], float] = time.monotonic,
        beside: Admission | None = None,
    ) -> None:
        """clock: monotonic seconds. beside: the admission of another model of the server; keys' limits and
        ``supersedes_key`` cover both."""
        self._client, self._clock = client, clock
        self._max_tokens = config.max_queued_tokens
        self._usage: dict[str, KeyUsage] = {} if beside is None else beside._usage
        self._streams: dict[RequestStream, KeyUsage] = {}
        self._by_key: dict[str, tuple[Admission, RequestStream]] = {} if beside is None else beside._by_key
        self._rates = Rates()
        self.experiments: ExperimentTraffic | None = None  # None while none runs
        self.windows: WindowReader | None = None  # for predictions of next edits; None until a tokenizer is loaded
        # Gets the stream of a request with an objective of time to first token, and the caller's scope of the cache
        self.watch_prompt: Callable[[RequestStream, str], None] = lambda stream, owner: None

    @property
    def in_flight(self) -> int:
        """Admitted requests that have not ended."""
        return len(self._streams)

    @property
    def waiting(self) -> int:
        """Requests in flight that the engine has not started."""
        return sum(not stream.started for stream in self._streams)

    @property
    def waiting_tokens(self) -> int:
        """Pending prompt tokens of requests that the engine has not started."""
        return sum(stream.request.tokens_to_read for stream in self._streams if not stream.started)

    def admit(
        self,
        principal: Principal,
        request: Request,
        supersedes_key: str = "",
        *,
        asks_again: bool = False,
    ) -> RequestStream:
        """Submit ``request`` on behalf of ``principal``. Use the stream as ``async with``, or close it.

        supersedes_key: ends the running request of the same tenant with the same key. asks_again: the call submits it
        again if it is refused for lack of room.

        Raises:
            InvalidRequestError: ``supersedes_key`` is too long, or the caller may not choose the experiment arm that it
                asks for.
            RateLimitedError: the key has used up a limit.
            QueueFullError: too many prompt tokens wait, or too many requests behind one that runs alone.
            LateError: it is not expected to meet its deadline.
            EngineDeadError: the engine is not ready.
            DuplicateRequestError: its id is in flight.
        """
        if self.experiments is None:
            stream = self._admit(principal, request, supersedes_key)
        else:
            stream = self.experiments.admit(principal, request, supersedes_key, self._admit, asks_again=asks_again)
        if request.omitted is not None:
            self.watch_prompt(stream, principal.scoped(request.cache_salt))  # not that of an experiment's arm
        return stream

    def _admit(self, principal: Principal, request: Request, supersedes_key: str) -> RequestStream:
        if len(supersedes_key) > MAX_NAME:
            raise InvalidRequestError.of("supersedes_key", f"at most {MAX_NAME} characters")
        now, own, call = self._clock(), principal.scope_request(request), current_call()
        key = principal.scoped(supersedes_key) if supersedes_key else ""
        owner, older = self._by_key.get(key, (self, None)) if key else (self, None)
        usage = self._usage_of(principal, now)
        leaving = int(older is not None and owner._streams[older] is usage)
        here = older if owner is self else None  # another model's request leaves no room here
        later = call is not None and bool(call.requests)
        usage.check(principal.limits, leaving, self._rates.interval_s or self.wait_s(here), now, later=later)
        self._check_room(own, here, now)
        self._check_time(own, here, now)
        stream = self._client.generate(own if self.windows is None else self.windows.predict(own))
        if not self._streams:
            self._rates.work_begins(now)
        stream.listen(self, request.request_id, key, now)
        if older is not None:
            older.supersede(owner._client.abort)
        self._streams[stream] = usage
        usage.begin(own.tokens_to_read, now)
        if key:
            self._by_key[key] = self, stream
        return stream

    def check_rate(self, principal: Principal) -> None:
        """Check the key's limits before costly work on a call that may become a request.

        Raises:
            RateLimitedError: the key has used up a limit.
        """
        now = self._clock()
        self._usage_of(principal, now).check_rate(now)

    def abort(self, principal: Principal, request_id: str) -> bool:
        """End a request of the principal's tenant: its reader gets Finished(ABORTED) per open sample.

        Returns False if it is not in flight.
        """
        return self._client.abort(principal.scoped(request_id))

    def on_event(self, stream: RequestStream, event: RequestEvent) -> None:
        """Account for ``event`` of ``stream``."""
        now = self._clock()
        if isinstance(event, Delta):
            self._streams[stream].spend(len(event.token_ids), now)
        elif isinstance(event, Finished) and stream.started:  # else it held no place, so its end freed none
            self._rates.finished(event, now)

    def ended(self, stream: RequestStream) -> None:
        """Account for the end of ``stream``. A prompt that the engine did not start is not counted."""
        usage = self._streams.pop(stream)
        usage.end()
        if not stream.started:
            usage.spend(-stream.request.tokens_to_read, self._clock())
        self._by_key.pop(stream.supersedes_key, None)

    def wait_s(self, but: RequestStream | None = None) -> float:
        """The ``retry_after_s`` of a refusal: `forecast_s`, or a second where that is 0."""
        return self.forecast_s(but=but) or _UNKNOWN_RETRY_S

    def forecast_s(self, tokens: float = math.inf, but: RequestStream | None = None) -> float:
        """Expected seconds until a request submitted now starts if ``but`` were not in flight; 0: at once. Before the
        rates are known, at least the longest wait so far. tokens: its prompt's length; by default it comes last."""
        now = self._clock()
        others = [stream for stream in self._streams if stream is not but]
        waiting = [stream for stream in others if not stream.started]
        places = sum(stream.samples_left for stream in waiting) + 1
        measured_s = self._wait_for(others, places, [stream.request for stream in waiting], tokens)
        waited_s = max((now - stream.admitted_s for stream in waiting), default=0.0)
        return measured_s if self._rates.known(now) else max(waited_s, measured_s)

    def _wait_for(self, others: Sequence[RequestStream], places: int, ahead: Sequence[Request], tokens: float) -> float:
        """Seconds, at the measured rates, until a prompt of ``tokens`` can start: until ``others`` leave ``places``
        places, and the scheduler has computed what comes before it of the prompts ``ahead``.

        Places come free at the rate at which samples end. The scheduler gives most of each chunk to the shortest
        prompts, so of a longer prompt only ``tokens`` come before. The result is the longer of the two waits."""
        running = sum(stream.samples_left for stream in others if stream.started)
        missing = max(0, places - max(0, self._client.info.max_batch - running))
        before = sum(min(request.tokens_to_read, tokens) for request in ahead)
        return max(missing * (self._rates.interval_s or 0.0), self._rates.prefill_s(before))

    def _usage_of(self, principal: Principal, now: float) -> KeyUsage:
        usage = self._usage.get(principal.name)
        if usage is None:
            usage = self._usage[principal.name] = KeyUsage(principal.name)
        usage.apply(principal.limits, now)
        return usage

    def _check_room(self, request: Request, older: RequestStream | None, now: float) -> None:
        """Refuse beyond the configured prompt tokens; a prompt of any length may wait alone."""
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
        """Refuse a request that cannot meet its deadline; an idle engine takes any, which renews the rates."""
        if request.deadline_s is None or not self._rates.known(now):
            return
        others = [stream for stream in self._streams if stream is not older]
        if not others:
            return
        ahead = [t.request for t in others if not t.started and t.request.priority >= request.priority]
        places = sum(each.sampling.n for each in ahead) + request.sampling.n
        wait_s = self._wait_for(others, places, ahead, request.tokens_to_read)
        needed_s = LATE_MARGIN * (wait_s + self._rates.own_s(request))
        if needed_s > request.deadline_s:
            # The part of the wait that exceeds the deadline, at most all of it.
            too_much = needed_s - request.deadline_s
            raise LateError(needed_s, request.deadline_s, min(too_much, wait_s))


_Events = asyncio.Queue[tuple[int, RequestEvent | Exception | None]]


class _Running(NamedTuple):
    """A request of a call."""

    stream: RequestStream
    reading: asyncio.Task[None]
    asks_again: bool  # if the engine's queue is full: others of the call ran when it was submitted


async def run_requests(
    admission: Admission, requests: Sequence[Request], key: str = "", *, most: int | None = None
) -> AsyncGenerator[RequestEvent]:
    """The events of ``requests``. Sample i of request r has the index r * n + i.

    Read it inside `contextlib.aclosing`: closing it aborts all requests in the engine. A request that is submitted
    while no other one of the call runs, as the first is, must find room. One that finds none beside others waits until
    one of those has ended, because the call itself may take the room.

    key: ``supersedes_key``; ignored unless there is exactly one request. most: how many run at once; None: all.

    Raises:
        RequestError: admission or the engine refuses a request, or the engine fails.
    """
    if len(requests) == 1:
        async with admission.admit(current_caller(), requests[0], key) as stream:
            async for event in stream:
                yield event
        return
    waiting = deque(enumerate(requests))
    running: dict[int, _Running] = {}
    # It is short, so a slow client's events wait in the streams, which are bounded.
    queue: _Events = asyncio.Queue(len(requests))

    def admit() -> None:
        while waiting and len(running) < (most or len(requests)):
            (number, request), beside = waiting[0], bool(running)
            try:
                stream = admission.admit(current_caller(), request, asks_again=beside)
            except (QueueFullError, RateLimitedError):  # the latter only for `max_concurrent`, as the call has begun
                if not beside:
                    raise
                return
            waiting.popleft()
            running[number] = _Running(stream, asyncio.create_task(_read(number, stream, queue)), beside)

    try:
        admit()
        while running:
            number, item = await queue.get()
            if item is None:
                del running[number]
                admit()
            elif isinstance(item, QueueFullError) and running[number].asks_again:
                waiting.appendleft((number, requests[number]))
                del running[number]
                if not running:  # the others have ended meanwhile
                    admit()
            elif isinstance(item, Exception):
                raise item
            else:
                if isinstance(item, Delta | Finished):
                    item.index += number * requests[0].sampling.n
                yield item
    finally:
        for each in running.values():
            each.reading.cancel()
            each.stream.close()


async def _read(number: int, stream: RequestStream, queue: _Events) -> None:
    """Pass the events of ``stream`` to ``queue``, and then its error or None."""
    end = None
    try:
        async for event in stream:
            await queue.put((number, event))
    except Exception as error:  # raised again by the reader of the queue
        end = error
    await queue.put((number, end))
