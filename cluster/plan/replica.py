"""A simulated replica: the engine's own steps, scheduler and KV index, and admission, on a virtual clock."""

from __future__ import annotations

import random
from collections.abc import Callable, Coroutine
from collections.abc import Sequence as Seq
from typing import TYPE_CHECKING, Any, cast

from cluster.plan.drafts import DraftLaw, SimulatedDrafting
from cluster.plan.profile import Profile
from draft.manager import DrafterManager
from server.admission import Admission
from server.auth.principal import ANYBODY
from server.observe.observer import Observer
from server.request_stream import RequestStream, UnreadEvents
from specdec.config import ServerConfig
from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler
from specdec.core.tree import TokenTree
from specdec.core.types import Delta, Request, RequestEvent, Started
from specdec.engine.engine import Engine, EngineParts
from specdec.engine.profile_costs import StepCosts
from specdec.engine.scheduler import PlanEntry
from specdec.engine.verify import Acceptance, StepVerifier
from specdec.errors import RequestError
from specdec.models.decoder import TargetDecoder
from specdec.models.tokenizer import Tokenizer
from verify_kernels.forward_batch import PAGE_SIZE

if TYPE_CHECKING:
    from server.engine_client import EngineClient

VOCABULARY = 2**31 - 1  # large, since one token stands for a whole block of a prompt
IDLE_S = 1e-4  # duration of a step without any work


class VirtualClock:
    """``now``: seconds, advanced by `spend_ms` only."""

    __slots__ = ("now",)

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spend_ms(self, milliseconds: float) -> None:
        """Advances the clock."""
        self.now += milliseconds / 1e3


class SimulatedVerifier(StepVerifier):
    """Spends the expected time of each forward, times a sample of the profile's noise; emits the tokens ``drawn`` for
    each entry. There is no target, and no request asks for its states."""

    overlaps = False
    keeps_aux_states = False

    def __init__(self, profile: Profile, clock: VirtualClock, rng: random.Random, drawn: Seq[int]) -> None:
        self._costs, self._noise = CostTable.from_dict(profile.verify), profile.noise
        self._clock, self._rng, self._drawn = clock, rng, drawn

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """Completes the forward before it returns."""
        rows, plain, looked = 0, 0, 0.0
        accepted: list[Acceptance] = []
        for entry, tree, tokens in zip(entries, trees, self._drawn, strict=True):
            prefill = entry.prefill
            rows += prefill
            plain += prefill + 1
            looked += (prefill + 1) * (entry.seq.n_computed + 0.5 * prefill)  # the context of `StepTrace`
            if tree is None:
                accepted.append(Acceptance())
            else:
                rows += len(tree)
                accepted.append(Acceptance(list(range(1, tokens)), [0] * tokens))
        forward_ms = self._costs.ms(rows, looked / plain)
        self._clock.spend_ms(forward_ms * self._rng.choice(self._noise) if self._noise else forward_ms)
        return lambda: accepted


class _NoTokenizer:
    """Requests ask for no text and have no stops."""

    eos_ids: frozenset[int] = frozenset()
    special_ids: frozenset[int] = frozenset()


Outcome = RequestEvent | RequestError
"""The next event of a request, or the reason of its refusal."""


class Replica:
    """One engine behind its admission. The caller passes requests to `admit`, calls `step` while the replica is `busy`,
    and collects the outcomes with `outcomes` at the time that `step` returned.

    Times are seconds of one clock for all replicas. ``seed``: of its random numbers.
    """

    def __init__(self, profile: Profile, law: DraftLaw, seed: int) -> None:
        self._clock, self._front_clock = VirtualClock(), VirtualClock()
        self.info = profile.engine_info(VOCABULARY)  # the engine's, for admission
        self._engine = self._build(profile, law, random.Random(seed))
        limits = profile.limits
        server = ServerConfig(max_queued_tokens=limits.max_queued_tokens)
        self._admission = Admission(cast("EngineClient", self), server, self._front_clock)
        self._observer, self._unread = Observer(), UnreadEvents()
        self._streams: dict[str, RequestStream] = {}  # of admitted requests that have not ended
        self._inbox: list[Request] = []
        self._events: list[RequestEvent] = []
        self._refused: list[str] = []

    def _build(self, profile: Profile, law: DraftLaw, rng: random.Random) -> Engine:
        config, clock = profile.engine_config(), self._clock
        drawn: list[int] = []

        def drafting(panel: DrafterManager, controller: Controller) -> SimulatedDrafting:
            return SimulatedDrafting(panel, controller, law, profile.overheads, rng, drawn, clock.spend_ms)

        kv = KvCacheManager(profile.limits.kv_tokens // PAGE_SIZE, prefix_cache=config.prefix_cache)
        nothing: Any = None  # the simulation neither decodes nor samples
        return Engine(
            EngineParts(
                config, self.info, cast(Tokenizer, _NoTokenizer()), cast(TargetDecoder, nothing),
                cast(Sampler, nothing), kv, costs=StepCosts(profile.verify),
                verifier=SimulatedVerifier(profile, clock, rng, drawn), clock=clock, drafting=drafting,
                trace_steps=0, max_queued_requests=profile.limits.max_queued_requests,
            )
        )  # fmt: skip

    @property
    def busy(self) -> bool:
        """Whether a `step` has work."""
        return bool(self._inbox) or self._engine.has_work()

    def admit(self, request: Request, now: float) -> None:
        """Admits ``request``, which has a unique id, at ``now``.

        Raises:
            RequestError: admission refuses it.
        """
        self._front_clock.now = now
        self._admission.admit(ANYBODY, request)

    def step(self, now: float) -> float:
        """Submits the admitted requests and runs a step from ``now`` on; returns its end."""
        clock, engine = self._clock, self._engine
        clock.now = now
        inbox, self._inbox = self._inbox, []
        for request in inbox:
            try:
                engine.submit(request)
            except RequestError as error:
                self._streams[request.request_id].fail(error)
                self._refused.append(request.request_id)
        self._events = engine.step()
        if clock.now == now and engine.has_work():
            clock.now += IDLE_S
        return clock.now

    def outcomes(self, now: float) -> list[tuple[str, Outcome]]:
        """The events of the last step, in order, with their request ids; to be called at its end."""
        self._front_clock.now = now
        refused, events, self._refused, self._events = self._refused, self._events, [], []
        found: list[tuple[str, Outcome]] = [(request_id, self._next(request_id)) for request_id in refused]
        for event in events:
            self._streams[event.request_id].push(event)
            found.append((event.request_id, self._next(event.request_id)))
        return found

    def generate(self, request: Request) -> RequestStream:
        """Called by admission; the engine gets the request at the next step."""
        record = self._observer.request(request)
        stream = self._streams[request.request_id] = RequestStream(request, lambda complete: None, record, self._unread)
        self._inbox.append(request)
        return stream

    def _next(self, request_id: str) -> Outcome:
        """Returns what the reader of a request gets. It is available, so the coroutine must not wait."""
        stream = self._streams[request_id]
        outcome: Outcome
        reading = cast(Coroutine[Any, None, RequestEvent], stream.__anext__())
        try:
            reading.send(None)
        except StopIteration as done:
            outcome = done.value
        except RequestError as error:
            outcome = error
        else:
            raise RuntimeError("a reader waits for an event that is available")
        if not isinstance(outcome, Started | Delta):
            del self._streams[request_id]
            stream.close()
        return outcome
