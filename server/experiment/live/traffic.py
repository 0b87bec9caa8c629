"""Running experiments, and the requests that participate."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from server.admission import Submit
from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.errors import FileErrors, RateLimitedError
from server.experiment.config import Stopping
from server.experiment.folder import State
from server.experiment.live.choosing import BlockChooser, EngineSwitch, KeyChooser
from server.experiment.live.plan import LivePlan
from server.experiment.live.recording import RecordSink, record_of, refused_record
from server.experiment.records import Choice, Record, RunClock
from server.observe.records import ARM_HEADER, CallRecord, RequestRecord, current_call
from server.request_stream import RequestStream
from specdec.core.types import Request
from specdec.errors import (
    DuplicateRequestError,
    FingerprintMismatchError,
    InvalidRequestError,
    PromptTooLongError,
    QueueFullError,
    RequestError,
)

_LOG = logging.getLogger(__name__)


def read_arms(text: str) -> Mapping[str, str]:
    """Arms by experiment, from a comma-separated list.

    Raises:
        InvalidRequestError: the text is not one.
    """
    found: dict[str, str] = {}
    for entry in text.split(","):
        name, equals, arm = (part.strip() for part in entry.partition("="))
        if not (name and equals and arm):
            raise InvalidRequestError.of(ARM_HEADER, "must be EXPERIMENT=ARM, or a comma-separated list")
        found[name] = arm
    return found


def append_arms(before: str, arms: Iterable[tuple[str, str]]) -> str:
    """The list ``before`` with ``arms`` (experiment, arm) appended, without repetitions."""
    entries = [entry for entry in before.split(", ") if entry]
    return ", ".join(dict.fromkeys((*entries, *(f"{name}={arm}" for name, arm in arms))))


OWN_OPTIONS, NO_ARM, NO_DRAFTER, NO_INDEX, NO_PRIORITY = (
    "set their own options",
    "outside of the share, or without a key",
    "drafter not loaded",
    "index not for their key",
    "priority above their key's",
)


class RunningExperiment:
    """Assigns arms to requests and records their outcome. Belongs to one event loop.

    written: records of earlier runs, by arm; ran_s: seconds that these took. on_over: called once, with state and
    reason, when the experiment must end.

    Raises:
        OSError: the folder cannot be written.
    """

    def __init__(
        self,
        plan: LivePlan,
        folder: Path,
        client: EngineClient,
        clock: RunClock,
        written: Mapping[str, int],
        ran_s: float,
        on_over: Callable[[State, str], object],
        file_errors: FileErrors,
    ) -> None:
        self.plan = plan
        self._recorded = Counter({name: written.get(name, 0) for name in plan.config.arms})
        self.left_out: Counter[str] = Counter()  # requests of this run that do not participate, by reason
        self._client, self._clock, self._on_over = client, clock, on_over
        self._earlier_s, self._began_s = ran_s, clock.now()
        self._run, self._serial = uuid.uuid4().hex[:8], 0
        self._over = False
        self._timer: asyncio.TimerHandle | None = None
        self._switch: EngineSwitch | None = None
        self._chooser = self._make_chooser()
        self._sink = RecordSink(folder, file_errors)  # last: it opens a file

    @property
    def records(self) -> dict[str, int]:
        """Records by arm, including earlier runs; those that wait for the disk count already."""
        return {arm: count - self._sink.lost[arm] for arm, count in self._recorded.items()}

    @property
    def ran_s(self) -> float:
        """Seconds that the experiment has run, including earlier runs."""
        return self._earlier_s + self._clock.now() - self._began_s

    def start(self) -> None:
        if self._switch is not None:
            self._switch.start()
        limit_s = self.plan.config.stopping.max_duration
        if limit_s is not None:
            left_s = limit_s - self._earlier_s
            self._timer = asyncio.get_running_loop().call_later(left_s, self._end, "finished", _TIME_OVER)

    def take(self, principal: Principal, request: Request, asked: str | None = None) -> Choice | str:
        """The request's arm, or why it has none. ``asked``: the arm that its caller requests."""
        if not self.plan.leaves_free(request):
            return OWN_OPTIONS
        if not self.plan.named("drafters") <= set(self._client.info.drafters):
            return NO_DRAFTER
        # Checked for both arms: they must have the same callers.
        if principal.denied_indexes(self.plan.named("indexes")):
            return NO_INDEX
        ceiling, highest = principal.limits.max_priority, self.plan.highest_priority
        if ceiling is not None and highest is not None and ceiling < highest:  # the cap would make both arms alike
            return NO_PRIORITY
        choice = self._chooser.choose(principal, request)
        if asked is not None:
            choice = (choice or Choice(asked))._replace(arm=asked, overridden=True)
        if choice is None:
            return NO_ARM
        self._serial += 1
        return choice._replace(request=f"{request.request_id}#{self._run}-{self._serial}")  # unique across restarts

    def put(self, choice: Choice, request: Request) -> Request:
        """``request`` with the options of its arm."""
        return self.plan.options[choice.arm].put(request)

    def refused(self, choice: Choice | str, asks_again: bool, error: RequestError) -> None:
        """The request was refused: the queue was full, or the engine down. choice: as `take` returned it."""
        make = partial(refused_record, error=error, clock=self._clock, at_s=time.monotonic())
        self._count(choice, asks_again, error, make)

    def ended(self, choice: Choice | str, asks_again: bool, seen: RequestRecord) -> None:
        """The request has ended, or the engine has refused it."""
        self._count(choice, asks_again, seen.error, partial(record_of, seen=seen, clock=self._clock))

    async def stop(self) -> str:
        """End: running requests continue unrecorded, and the engine gets its original draft model. Returns what failed,
        empty if nothing."""
        self._close()
        if self._switch is not None:
            try:
                await self._switch.stop()
            except RequestError as error:
                return f"the engine's draft model cannot be restored: {error}"
        return ""

    def abandon(self) -> None:
        """The server ends: leave the engine as it is."""
        self._close()
        if self._switch is not None:
            self._switch.abandon()

    def flush(self) -> None:
        """Wait until all records are on disk; blocks."""
        self._sink.close()

    def _make_chooser(self) -> KeyChooser | BlockChooser:
        config, assignment = self.plan.config, self.plan.config.assignment
        salt = assignment.salt or config.name
        if assignment.mode == "switchback":
            chooser = BlockChooser(
                salt, config.arms, assignment.block_s, assignment.washout_s, self._clock.now,
                waits_for_engine=self.plan.switches_engine,
            )  # fmt: skip
            if self.plan.switches_engine:
                self._switch = EngineSwitch(
                    self._client, self.plan.settings, chooser, lambda why: self._end("failed", why)
                )
            return chooser
        weights = {name: arm.weight for name, arm in config.arms.items()}
        return KeyChooser(salt, assignment.unit or "request", weights, assignment.share)

    def _count(
        self,
        choice: Choice | str,
        asks_again: bool,
        error: RequestError | None,
        make: Callable[[Choice], Record],
    ) -> None:
        """Count a request that has ended as left out, or write its record."""
        if asks_again and isinstance(error, _NO_ROOM):
            return  # its next attempt counts
        if isinstance(choice, str):
            self.left_out[choice] += 1
        elif not self._over and not isinstance(error, _CALLERS_OWN):
            self._recorded[choice.arm] += 1
            self._sink.put(choice.arm, partial(make, choice))
            if reason := limit_reached(self.plan.config.stopping, self.records, self.ran_s):
                self._end("finished", reason)

    def _end(self, state: State, reason: str) -> None:
        if not self._over:
            self._close()
            self._on_over(state, reason)

    def _close(self) -> None:
        """Record nothing from now on."""
        self._over = True
        if self._timer is not None:
            self._timer.cancel()


_TIME_OVER = "its time has passed"


def limit_reached(stopping: Stopping, records: Mapping[str, int], ran_s: float) -> str:
    """The limit that an experiment with so many records (by arm) has reached, in words; empty if none."""
    if stopping.max_requests is not None and sum(records.values()) >= stopping.max_requests:
        return f"{stopping.max_requests} requests were recorded"
    return _TIME_OVER if stopping.max_duration is not None and ran_s >= stopping.max_duration else ""


# Refusals that depend on the caller, not on the arm
_CALLERS_OWN = (
    RateLimitedError, DuplicateRequestError, InvalidRequestError, PromptTooLongError, FingerprintMismatchError,
)  # fmt: skip
_NO_ROOM = (QueueFullError, RateLimitedError)  # refusals after which a call may ask again


class LiveTraffic:
    """The running experiments; exists only while there is one."""

    def __init__(self, running: Sequence[RunningExperiment]) -> None:
        self._running = tuple(running)

    def admit(
        self, principal: Principal, request: Request, supersedes_key: str, submit: Submit, *, asks_again: bool = False
    ) -> RequestStream:
        """Submit ``request`` with the options of its arms; raises as ``submit``. asks_again: as in `Admission.admit`.

        Raises:
            InvalidRequestError: the caller requests an arm that does not exist or is not allowed.
        """
        if request.stopping.max_tokens == 0:  # only warms the cache
            return submit(principal, request, supersedes_key)
        call = current_call()
        asked = self._asked(call)
        taken = [(each, each.take(principal, request, asked.get(each.plan.config.name))) for each in self._running]
        changed = request
        for experiment, choice in taken:
            if not isinstance(choice, str):
                changed = experiment.put(choice, changed)
        try:
            stream = submit(principal, changed, supersedes_key)
        except RequestError as error:
            for experiment, choice in taken:
                experiment.refused(choice, asks_again, error)
            raise
        stream.record.when_ended += tuple(partial(each.ended, choice, asks_again) for each, choice in taken)
        if call is not None and not call.many:
            assigned = [(each.plan.config.name, found.arm) for each, found in taken if not isinstance(found, str)]
            call.arm = append_arms(call.arm, assigned)
        return stream

    def _asked(self, call: CallRecord | None) -> Mapping[str, str]:
        """The arms that the caller requests, by experiment; experiments that do not run here are ignored."""
        if call is None or not call.arm_asked:
            return {}
        running = {experiment.plan.config.name: experiment.plan.config for experiment in self._running}
        asked = {name: arm for name, arm in read_arms(call.arm_asked).items() if name in running}
        for name, arm in asked.items():
            config = running[name]
            if not config.assignment.allow_override:
                raise _refusal(f"{name} does not allow callers to choose; leave the header out, or set "
                               "`allow_override` in the experiment's assignment")  # fmt: skip
            if arm not in config.arms:
                raise _refusal(f"{name} has no arm {arm[:64]!r}; its arms are {', '.join(config.arms)}")
        return asked


def _refusal(problem: str) -> InvalidRequestError:
    return InvalidRequestError.of(ARM_HEADER, problem)
