"""One experiment while it runs."""

from __future__ import annotations

import logging
import uuid
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path

from server.auth.principal import Principal
from server.engine_client import EngineClient
from server.experiment.live.blocks import Blocks
from server.experiment.live.choice import Choice
from server.experiment.live.chooser import Chooser, KeyChooser, ShadowChooser
from server.experiment.live.engine_switch import EngineSwitch
from server.experiment.live.live_plan import LivePlan
from server.experiment.live.make_record import Decode, make_record, refused_record
from server.experiment.live.part import Part
from server.experiment.live.record_sink import RecordSink
from server.experiment.live.run_clock import RunClock
from server.experiment.live.shadows import Seen, Shadows
from server.experiment.live.stored_state import State
from server.experiment.record import Record
from server.telemetry.request_record import RequestRecord
from specdec.errors import RequestError
from specdec.types import Request

_LOG = logging.getLogger(__name__)
OWN_OPTIONS, NO_ARM, NO_DRAFTER = (
    "set their own options",
    "outside of the share, or without a key",
    "drafter not loaded",
)


class RunningExperiment:
    """Gives arms to requests and writes down what became of them. Belongs to one event loop.

    ``written``: records by arm, those of earlier runs too; ``left_out``: requests that took no part, by why, since this
    run began. ``on_over`` is told once that the experiment is to end, with state and reason; by any thread.

    Raises:
        OSError: the folder can not be written to.
    """

    def __init__(
        self,
        plan: LivePlan,
        folder: Path,
        client: EngineClient,
        clock: RunClock,
        written: Mapping[str, int],
        on_over: Callable[[State, str], None],
        decode: Decode,
    ) -> None:
        self.plan = plan
        self.written = Counter({name: written.get(name, 0) for name in plan.config.arms})
        self.left_out: Counter[str] = Counter()
        self._client, self._clock, self._on_over = client, clock, on_over
        self._decode = decode if plan.config.store_prompts else None
        self._run, self._serial = uuid.uuid4().hex[:8], 0
        self._over = False
        self._sink = RecordSink(folder, lambda why: self._end("failed", why))
        self._switch: EngineSwitch | None = None
        self._chooser = self._make_chooser()
        assignment = plan.config.assignment
        self._shadows: Shadows | None = None
        if assignment.mode == "shadow":
            beside = assignment.shadow == "beside"
            self._shadows = Shadows(client, plan.config.treatment, self._write_pair, beside=beside)

    @property
    def given_up(self) -> int:
        """Shadows that were not sent, or not to their end, as real requests needed the place."""
        return 0 if self._shadows is None else self._shadows.given_up

    def start(self) -> None:
        """Begin to switch the engine, where it is to be switched."""
        if self._switch is not None:
            self._switch.start()

    def make_room(self) -> None:
        """A real request comes in."""
        if self._shadows is not None:
            self._shadows.make_room()

    def take(self, principal: Principal, request: Request, asked: str | None = None) -> Part | None:
        """The request's part; None: it has none. ``asked``: the arm that its caller wants."""
        if not self.plan.leaves_free(request):
            self.left_out[OWN_OPTIONS] += 1
            return None
        if self.plan.drafters and not self.plan.drafters <= set(self._client.info.drafters):
            self.left_out[NO_DRAFTER] += 1
            return None
        choice = self._chooser.choose(principal, request)
        if asked is not None:
            choice = (choice or Choice(asked))._replace(arm=asked, shadowed=False)
        if choice is None:
            self.left_out[NO_ARM] += 1
            return None
        self._serial += 1
        shadows = self._shadows if choice.shadowed else None
        return Part(
            f"{request.request_id}#{self._run}-{self._serial}",
            choice,
            self._in_flight,
            self._ended if shadows is None else shadows.real_ended,
            overridden=asked is not None,
            keeps_tokens=shadows is not None,
        )

    def put(self, part: Part, request: Request) -> Request:
        """``request`` with the options of the part's arm."""
        return self.plan.options[part.choice.arm].put(request)

    def begin_shadow(self, part: Part, principal: Principal, request: Request) -> None:
        """A request of whose shadow ``part`` is the real half was let in; ``request``: without any arm's options."""
        if self._shadows is not None and part.choice.shadowed:
            options = self.plan.options[self.plan.config.treatment]
            self._shadows.begin(part, principal.own(options.put(request)))

    def refused(self, part: Part, request: Request, error: RequestError) -> None:
        """The request was not let in, as there was no room, or no engine."""
        if not part.choice.shadowed:
            now = self._clock.now()
            self._write(part.choice.arm, lambda: refused_record(part, request, error, now))

    async def stop(self) -> str:
        """End: what runs goes on unrecorded, and the engine gets its own draft model back; returns what went wrong."""
        self._close()
        if self._switch is not None:
            try:
                await self._switch.stop()
            except RequestError as error:
                return f"the engine's draft model could not be put back: {error}"
        return ""

    def abandon(self) -> None:
        """The server ends: leave everything as it is."""
        self._close()
        if self._switch is not None:
            self._switch.abandon()

    def flush(self) -> None:
        """Wait until all records are on the disk; after the end, in a thread."""
        self._sink.close()

    def _close(self) -> None:
        self._over = True
        if self._shadows is not None:
            self._shadows.close()

    def _make_chooser(self) -> Chooser:
        config, salt = self.plan.config, self.plan.salt
        assignment = config.assignment
        if assignment.mode == "switchback":
            blocks = Blocks(
                salt, config.arms, assignment.block_s, assignment.washout_s, self._clock.now,
                waits_for_engine=self.plan.switches_engine,
            )  # fmt: skip
            if self.plan.switches_engine:
                self._switch = EngineSwitch(
                    self._client, self.plan.settings, blocks, self._clock.now, lambda why: self._end("failed", why)
                )
            return blocks
        unit = assignment.unit or "request"
        if assignment.mode == "shadow":
            return ShadowChooser(salt, unit, config.control, assignment.share)
        return KeyChooser(salt, unit, {name: arm.weight for name, arm in config.arms.items()}, assignment.share)

    def _in_flight(self) -> int:
        return self._client.in_flight

    def _ended(self, part: Part, seen: RequestRecord) -> None:
        self._write(part.choice.arm, lambda: make_record(part, seen, self._clock, self._decode))
        self._check_limit()

    def _write_pair(self, real: Seen, shadow: Seen) -> None:
        for part, seen in (real, shadow):
            self._write(part.choice.arm, self._maker(part, seen, real[0].name))
        self._check_limit()

    def _maker(self, part: Part, seen: RequestRecord, pair: str) -> Callable[[], Record]:
        return lambda: make_record(part, seen, self._clock, self._decode, pair)

    def _write(self, arm: str, make: Callable[[], Record]) -> None:
        if self._over:
            return
        self.written[arm] += 1
        self._sink.put(make)

    def _check_limit(self) -> None:
        limit = self.plan.config.stopping.max_requests
        if limit is not None and self.written.total() >= limit:
            self._end("finished", f"{limit} requests were recorded")

    def _end(self, state: State, reason: str) -> None:
        if not self._over:
            self._over = True
            self._on_over(state, reason)
