"""Lets requests in: the one way from any face of the server to the engine."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from server.admission.admission_errors import MIN_RETRY_S, LateError, TokenQueueFullError
from server.admission.forecast import Ahead, forecast
from server.admission.key_usage import KeyUsage
from server.admission.rates import Rates
from server.admission.ticket import Ticket
from server.auth.principal import Principal
from server.engine_client import EngineClient
from specdec.config import ServerConfig
from specdec.types import Delta, Finished, Request, RequestEvent, Started

if TYPE_CHECKING:
    from server.experiment.live.live_traffic import LiveTraffic

_UNKNOWN_RETRY_S = 1.0
# Under overload every request that is let in is one that just fits: of half of them the forecast is too short. What is
# refused for it is not missed, for others wait to take the place.
MARGIN = 1.15


class Admission:
    """Knows what the engine can not: whose a request is, what its key has used, what it supersedes. The engine queues,
    and bounds its queue by number; here it is bounded by tokens, and what can not be done in time is not begun.

    Belongs to one event loop. ``clock`` gives monotonic seconds. ``experiments``: those that run; None where none does.
    """

    def __init__(self, client: EngineClient, config: ServerConfig, clock: Callable[[], float] = time.monotonic) -> None:
        self._client, self._clock = client, clock
        self._max_tokens, self._shed_late = config.max_queued_tokens, config.shed_late
        self._usage: dict[str, KeyUsage] = {}
        self._tickets: dict[Ticket, KeyUsage] = {}
        self._by_key: dict[str, Ticket] = {}
        self._rates = Rates()
        self.experiments: LiveTraffic | None = None

    @property
    def in_flight(self) -> int:
        """Requests that were let in and have not ended."""
        return len(self._tickets)

    @property
    def waiting_tokens(self) -> int:
        """Prompt tokens of the requests of which the engine has said nothing yet."""
        return sum(len(ticket.request.prompt_ids) for ticket in self._tickets if not ticket.started)

    def admit(self, principal: Principal, request: Request, supersedes_key: str = "") -> Ticket:
        """Give ``request`` to the engine in the name of ``principal``; to be used as ``async with``, or closed.

        ``supersedes_key``: ends the running request of the same tenant that has the same one.

        Raises:
            InvalidRequestError: the caller asks for an arm of an experiment that it may not have.
            RateLimitedError: the key has used up a limit.
            QueueFullError: too many prompt tokens wait.
            LateError: it would not be done by its deadline.
            EngineDeadError: the engine is not ready.
            DuplicateRequestError: its id is in flight.
        """
        if self.experiments is not None:
            return self.experiments.admit(principal, request, supersedes_key, self._admit)
        return self._admit(principal, request, supersedes_key)

    def _admit(self, principal: Principal, request: Request, supersedes_key: str) -> Ticket:
        now, own = self._clock(), principal.own(request)
        key = principal.scoped(supersedes_key) if supersedes_key else ""
        older = self._by_key.get(key) if key else None
        usage = self._usage_of(principal, now)
        leaving = int(older is not None and self._tickets[older] is usage)
        usage.check(principal.limits, leaving, self._rates.interval_s or _UNKNOWN_RETRY_S, now)
        self._check_room(own, older, now)
        self._check_time(own, older, now)
        stream = self._client.generate(own)
        if not self._tickets:
            self._rates.work_begins(now)
        ticket = Ticket(own, request.request_id, stream, self, key)
        if older is not None:
            older.supersede(self._client.abort)
        self._tickets[ticket] = usage
        usage.begin(len(own.prompt_ids), now)
        if key:
            self._by_key[key] = ticket
        return ticket

    def abort(self, principal: Principal, request_id: str) -> bool:
        """End a request of the principal's tenant: its reader gets Finished(ABORTED) per open sample. False when it is
        not in flight."""
        return self._client.abort(principal.scoped(request_id))

    def heard(self, ticket: Ticket, event: RequestEvent) -> None:
        """The reader of ``ticket`` got ``event``."""
        now = self._clock()
        if isinstance(event, Started):
            ticket.started = True
        elif isinstance(event, Delta):
            self._tickets[ticket].spend(len(event.token_ids), now)
        elif isinstance(event, Finished):
            self._rates.finished(event, now)

    def ended(self, ticket: Ticket) -> None:
        """``ticket`` takes no room any more; a prompt that was not even begun is not counted."""
        usage = self._tickets.pop(ticket)
        usage.end()
        if not ticket.started:
            usage.spend(-len(ticket.request.prompt_ids), self._clock())
        self._by_key.pop(ticket.key, None)

    def _usage_of(self, principal: Principal, now: float) -> KeyUsage:
        usage = self._usage.get(principal.name)
        if usage is None:
            usage = self._usage[principal.name] = KeyUsage(principal.name)
        usage.apply(principal.limits, now)
        return usage

    def _check_room(self, request: Request, older: Ticket | None, now: float) -> None:
        """A prompt of any length may wait alone."""
        waiting = self.waiting_tokens
        if older is not None and not older.started:
            waiting -= len(older.request.prompt_ids)
        excess = waiting + len(request.prompt_ids) - self._max_tokens
        if self._max_tokens and waiting and excess > 0:
            known = self._rates.known(now)
            raise TokenQueueFullError(
                self._max_tokens, waiting, self._rates.prefill_s(excess) if known else _UNKNOWN_RETRY_S
            )

    def _check_time(self, request: Request, older: Ticket | None, now: float) -> None:
        """An idle engine takes whatever comes: that is how its rates become known again."""
        if not self._shed_late or request.deadline_s is None or not self._rates.known(now):
            return
        others = [ticket for ticket in self._tickets if ticket is not older]
        if not others:
            return
        ahead = [t.request for t in others if not t.started and t.request.priority >= request.priority]
        running = sum(ticket.samples_left for ticket in others if ticket.started)
        expected = forecast(
            request,
            Ahead(
                sum(waiting.sampling.n for waiting in ahead),
                sum(len(waiting.prompt_ids) for waiting in ahead),
                max(0, self._client.info.max_batch - running),
            ),
            self._rates,
        )
        needed_s = MARGIN * expected.total_s
        if needed_s > request.deadline_s:
            # Room by then: as much of the wait as is too much for the deadline, or all of it where none would do.
            too_much = needed_s - request.deadline_s
            raise LateError(needed_s, request.deadline_s, max(MIN_RETRY_S, min(too_much, expected.wait_s)))
