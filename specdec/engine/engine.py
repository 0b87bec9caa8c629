"""The engine: one thread, one `step` at a time; requests in, events out."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

from draft.manager import STALL_MS, DrafterManager
from draft.model import ModelDrafter
from draft.prediction import PredictionDrafter
from draft.protocol import Drafter, ModelBasedDrafter
from specdec.config import EngineConfig, WeightDtype
from specdec.control.controller import Controller
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.learned import Learned
from specdec.control.params import DEFAULT_PARAMS, ControlParams
from specdec.control.prefill_pace import PrefillPace
from specdec.control.trace import TraceLog, TraceWriter
from specdec.core.cache_events import CacheRecorder
from specdec.core.kv_cache import KvCacheManager
from specdec.core.sampling import Sampler, TokenGrammar
from specdec.core.seeds import draw_seed, sample_seed
from specdec.core.sequence import Ending, Sequence
from specdec.core.types import (
    EngineInfo,
    EngineLoad,
    Failed,
    Finished,
    FinishReason,
    Request,
    RequestEvent,
    Started,
    StepTrace,
    Usage,
)
from specdec.engine.profile_cache import LearnedProfile
from specdec.engine.profile_costs import StepCosts
from specdec.engine.propose import Drafting
from specdec.engine.scheduler import Scheduler, SchedulerLimits
from specdec.engine.step import Step, StepResult, StepTracer
from specdec.engine.totals import StepTotals, Throughput
from specdec.engine.validation import check_requests
from specdec.engine.verify import StepVerifier, Verifier
from specdec.errors import ConfigError, DuplicateRequestError
from specdec.grammar.compiler import GrammarCompiler
from specdec.grammar.token_healing import TokenHealing, TokenSpelling
from specdec.models.decoder import HostDecoder, TargetDecoder
from specdec.models.tokenizer import Tokenizer

LoadedDraft = tuple[str, ModelBasedDrafter]
"""A draft model's name, and the drafter over it."""


@dataclass(frozen=True, slots=True)
class EngineParts:
    """The parts of an engine. `specdec.engine.build` makes them; tests replace some."""

    config: EngineConfig
    info: EngineInfo
    tokenizer: Tokenizer
    decoder: TargetDecoder
    sampler: Sampler
    kv: KvCacheManager
    drafters: Seq[Drafter] = field(default_factory=list)
    costs: StepCosts | None = None
    """None: the controller starts from a guess."""
    load_draft: Callable[[str, WeightDtype | None], LoadedDraft] | None = None
    """Loads another draft model; None: the engine cannot swap it."""
    verifier: StepVerifier | None = None
    """None: the CPU's, over `decoder` and `sampler`."""
    learned: Mapping[str, Learned] = field(default_factory=dict)
    """The controller's initial estimates by drafter."""
    learned_file: LearnedProfile | None = None
    """File for its estimates; None: they end with the engine."""
    control_params: ControlParams = DEFAULT_PARAMS
    clock: Callable[[], float] = time.monotonic
    """Returns monotonic seconds; a simulation has its own."""
    drafting: Callable[[DrafterManager, Controller], Drafting] = Drafting
    """Makes the propose stage; a simulation has its own."""
    trusts_requests: bool = False
    """True: requests have passed `check_requests` before they are submitted; `submit` does not repeat it."""


KEEP_EVERY_S = 120.0  # between writings of what was learned


class Engine:
    """Serves requests by steps. Not thread-safe: the process that owns it calls it from one thread.

    `step` returns what happened since the last call: for each request Started, Deltas and one Finished per sample.
    """

    def __init__(self, parts: EngineParts) -> None:
        config = parts.config
        info = dataclasses.replace(parts.info, drafters=tuple(drafter.name for drafter in parts.drafters))
        self._clock, self._new_drafting, self._trusts_requests = parts.clock, parts.drafting, parts.trusts_requests
        self._info, self._tokenizer, self._kv, self._decoder = info, parts.tokenizer, parts.kv, parts.decoder
        limits = SchedulerLimits(
            max_batch=config.max_batch,
            max_step_rows=config.max_step_rows,
            prefill_chunk=config.prefill_chunk,
            max_context=info.max_context,
            max_queued=config.max_queued_requests,
            target_tpot_ms=config.target_tpot_ms,
        )
        costs = parts.costs or StepCosts(CostTable.guess(config.max_step_rows).as_dict())
        self._control_params = parts.control_params
        self._pace = PrefillPace(CostTable.from_dict(costs.verify), parts.control_params)
        self._scheduler = Scheduler(parts.kv, limits, parts.clock, self._pace)
        self._speculation, self._load_draft = config.speculation, parts.load_draft
        self._max_rows, self._began_s, self._swaps = config.max_step_rows, parts.clock(), 0
        self._verifier = parts.verifier or Verifier(cast(HostDecoder, parts.decoder), parts.sampler)
        self._learned_file, self._kept_at = parts.learned_file, parts.clock()
        controller = self._new_controller(parts.drafters, costs.verify, costs.drafting, parts.learned)
        self._trace = self._new_trace(controller)
        self._assemble(parts.drafters, controller)
        self._grammars = GrammarCompiler(parts.tokenizer, info.vocab_size)
        self._live: dict[str, list[Sequence]] = {}  # by request, the samples that have not finished
        self._unstarted: set[str] = set()  # requests of which Started was not said yet
        self._events: list[RequestEvent] = []
        self._throughput, self._totals = Throughput(), StepTotals()
        self.last_step: StepResult | None = None

    def submit(self, request: Request) -> None:
        """Queue ``request``.

        Raises:
            InvalidRequestError, PromptTooLongError: it can not be served as it is, or its grammar is none.
            FingerprintMismatchError: it was begun where other bits come out.
            DuplicateRequestError: its id is in flight.
            QueueFullError: too many wait already.
        """
        if not self._trusts_requests:
            check_requests([request], self._info)
        if request.request_id in self._live:
            raise DuplicateRequestError(f"request_id {request.request_id!r} is in flight; choose another")
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=draw_seed()))
        arrival = self._clock()
        sequences = [self._sequence(request, index, arrival) for index in range(request.sampling.n)]
        if sequences[0].ending is not None:
            self._over_already(request, sequences)
            return
        self._scheduler.add(sequences)  # last of what may refuse: a refused request leaves no trace
        self._live[request.request_id] = sequences
        self._unstarted.add(request.request_id)

    def _over_already(self, request: Request, sequences: list[Sequence]) -> None:
        """A resumed request whose tokens are the whole answer: it broke off before its end was told."""
        (sequence,) = sequences  # only one sample can be resumed
        assert sequence.ending is not None
        self._live[request.request_id] = sequences
        self._unstarted.add(request.request_id)
        self._started(sequence)
        if (rest := sequence.held_back()).text:
            self._events.append(rest)
        self._finish(sequence, sequence.ending)

    def _new_controller(
        self,
        drafters: Seq[Drafter],
        verify: dict[str, Any],
        drafting: dict[str, dict[str, Any]],
        learned: Mapping[str, Learned],
    ) -> Controller:
        """A fresh one over what was measured, `CostTable.as_dict` of the target's forward and of levels by drafter, and
        what was ``learned`` of them before."""
        tables = {}
        for name in (drafter.name for drafter in drafters if drafter.model_based):
            known = drafting.get(name)
            tables[name] = CostTable.guess(self._max_rows, 1.0) if known is None else CostTable.from_dict(known)
        model_based = {drafter.name: drafter.model_based for drafter in drafters}
        return Controller(model_based, CostTable.from_dict(verify), tables, learned, self._control_params)

    def _new_trace(self, controller: Controller) -> TraceLog:
        """A trace; its file, where one is asked for, begins with ``controller``: each swap starts another."""
        file, writer = self._speculation.trace_file, None
        if file is not None:
            name = f"{file.stem}.swap{self._swaps}{file.suffix}" if self._swaps else file.name
            writer = TraceWriter(file.with_name(name), controller.as_dict())
        return TraceLog(self._speculation.trace_steps, writer)

    def _assemble(self, drafters: Seq[Drafter], controller: Controller) -> None:
        """The parts of a step that know the drafters."""
        self._drafters, self._controller = list(drafters), controller
        cells = controller.estimates.calibration.size
        self._manager = DrafterManager(drafters, self._info.vocab_size, STALL_MS, cells=cells)
        self._drafting = self._new_drafting(self._manager, controller)
        tracer = StepTracer(self._trace, self._began_s) if self._trace.enabled else None
        self._step = Step(
            self._scheduler, self._kv, self._manager, self._drafting, self._verifier, tracer, self._clock, self._pace
        )

    @cached_property
    def _spelling(self) -> TokenSpelling:
        return TokenSpelling(self._tokenizer, self._info.vocab_size)

    def _sequence(self, request: Request, index: int, arrival_s: float) -> Sequence:
        grammar: TokenGrammar | None = None
        if request.grammar is not None:
            grammar = self._grammars.compile(request.grammar, request.sampling.allowed_token_ids)
        elif request.healing_prefix:
            grammar = TokenHealing(self._spelling, request.healing_prefix)
        assert request.sampling.seed is not None  # `submit` draws one
        seed = sample_seed(request.sampling.seed, index)
        return Sequence(
            request, index, seed, arrival_s, self._tokenizer, vocab_size=self._info.vocab_size,
            max_context=self._info.max_context, speculation=self._speculation, grammar=grammar,
        )  # fmt: skip

    def abort(self, request_id: str) -> bool:
        """End a request now; its pages are free on return. False when no such request is in flight."""
        sequences = self._live.get(request_id)
        if sequences is None:
            return False
        for sequence in list(sequences):
            self._finish(sequence, Ending(FinishReason.ABORTED))
        return True

    def preempt_newest(self) -> None:
        """Take the pages of the least important decoding sequence, as a full cache would: it is computed again.

        For verification and tests; a request never notices but by its time. One that still prefills is spared, or
        preempting often would keep it from ever emitting a token.
        """
        decoding = [seq for seq in self._scheduler.running if not seq.prefilling]
        if decoding:
            self._scheduler.preempt(decoding[-1])

    def has_work(self) -> bool:
        """Whether a `step` would do anything."""
        return bool(self._live or self._events)

    def step(self) -> list[RequestEvent]:
        """Run one step and return the events since the last one."""
        self._expire()
        if self._live:
            result = self._step.run()
            self.last_step = result
            self._totals.add(result)
            self._report(result)
        if not self._live:
            self._step.flush()
        if self._clock() - self._kept_at > KEEP_EVERY_S:
            self._keep_learned()
        events, self._events = self._events, []
        return events

    def info(self) -> EngineInfo:
        """What this engine is."""
        return self._info

    def load(self) -> EngineLoad:
        """How busy it is now.

        Raises:
            RankLostError: a process that the target is computed with is gone; the engine can not go on.
        """
        self._decoder.check()
        load = EngineLoad(
            running_requests=len({s.request.request_id for s in self._scheduler.running}),
            waiting_requests=self._scheduler.n_waiting_requests,
            free_pages=self._kv.n_free,
            total_pages=self._kv.n_total,
            tokens_per_second=self._throughput.per_second(self._clock()),
            prefix_hit_tokens=self._throughput.hit_tokens,
            prompt_tokens=self._throughput.prompt_tokens,
        )
        return self._totals.told(load)

    def flush_cache(self) -> int:
        """Forget the cached prefixes that no running request uses; returns how many pages that frees."""
        return self._kv.flush()

    def tell_cache(self, recorder: CacheRecorder) -> None:
        """Tell ``recorder`` of every page of the prefix cache from now on."""
        self._kv.tell(recorder)

    def load_draft(self, draft: str, dtype: WeightDtype | None) -> LoadedDraft:
        """Load a draft model for `swap_draft`, beside the one in use; may be called from another thread.

        draft, dtype: as in the configuration.

        Raises:
            ModelError: it can not be had, or memory is short for both.
            ConfigError: it can not draft for this target, or this engine does not draft.
        """
        self._check_swap()
        assert self._load_draft is not None  # checked above
        return self._load_draft(draft, dtype)

    def swap_draft(self, draft: LoadedDraft | None) -> EngineInfo:
        """Draft with another model from now on, or with none; returns what the engine is now.

        Running requests go on with the tokens they would have had: their drafters begin anew, and the controller too,
        with what was learned of them before. The old model's memory is free on return.

        Raises:
            ConfigError: this engine does not draft, or its next trace file can not be written; all is as before.
        """
        self._check_swap()
        self._step.flush()
        drafters = [drafter for drafter in self._drafters if drafter.name != ModelDrafter.name]
        if draft is not None:
            drafters.append(draft[1])
        costs = self._controller.as_dict()
        others = {name: table for name, table in costs["drafting"].items() if name != ModelDrafter.name}
        self._keep_learned()
        learned = {name: found for name, found in self.learned().items() if name != ModelDrafter.name}
        if self._learned_file is not None:
            learned = self._learned_file.read(drafters) | learned
        controller = self._new_controller(drafters, costs["verify"], others, learned)
        self._swaps += 1
        if self._speculation.trace_file is not None:
            new_trace = self._new_trace(controller)
            self._trace.close()
            self._trace = new_trace
        names = tuple(drafter.name for drafter in drafters)
        self._info = dataclasses.replace(self._info, draft=None if draft is None else draft[0], drafters=names)
        self._assemble(drafters, controller)
        self._kv.forget_drafts()
        for sequence in [sequence for sequences in self._live.values() for sequence in sequences]:
            sequence.draft_computed = sequence.n_draft_published = 0
            sequence.history = None
            if sequence.first_scheduled_s is not None:
                self._drafting.begin(sequence)
        return self._info

    def _check_swap(self) -> None:
        if not self._speculation.enabled or self._load_draft is None:
            raise ConfigError("engine.speculation.enabled: this engine was started without speculation; start it with")

    def trace(self, limit: int) -> list[StepTrace]:
        """What the last ``limit`` steps decided and what came of it, oldest first."""
        return self._trace.last(limit)

    def reliability(self) -> dict[str, list[tuple[float, float, float]]]:
        """Per drafter and bin of predicted chance: mean prediction, rate observed, nodes."""
        return self._controller.estimates.reliability.table()

    def learned(self) -> dict[str, Learned]:
        """What the controller knows of each drafter by now."""
        return self._controller.estimates.learned()

    def close(self) -> None:
        """End every request and the trace file, and keep what was learned."""
        for request_id in list(self._live):
            self.abort(request_id)
        self._step.flush()
        self._trace.close()
        self._keep_learned()

    def _keep_learned(self) -> None:
        self._kept_at = self._clock()
        if self._learned_file is not None:
            self._learned_file.write(self._drafters, self.learned())

    def _expire(self) -> None:
        now = self._clock()
        for sequence in [sequence for sequences in self._live.values() for sequence in sequences]:
            ending = sequence.expired(now)
            if ending is None:
                continue
            if ending.reason is FinishReason.TIME_LIMIT and (rest := sequence.held_back()).text:
                self._events.append(rest)
            self._finish(sequence, ending)

    def _report(self, result: StepResult) -> None:
        now = self._clock()
        for sequence in result.admitted:
            self._started(sequence)
        for sequence in result.prefilled:
            self._finish(sequence, Ending(FinishReason.LENGTH))
        emitted = 0
        for sequence, delta in result.deltas:
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            emitted += len(delta.token_ids)
            self._events.append(delta)
            if sequence.ending is not None:
                self._finish(sequence, sequence.ending)
        for sequence in result.broken:
            self._fail(sequence)
        self._throughput.add(emitted, now)

    def _started(self, sequence: Sequence) -> None:
        request_id, seed = sequence.request.request_id, sequence.request.sampling.seed
        if request_id not in self._unstarted:
            return
        self._unstarted.remove(request_id)
        self._throughput.prompt(sequence.n_prompt, sequence.cached_tokens)
        scheduled = sequence.first_scheduled_s or sequence.arrival_s
        queue_ms = (scheduled - sequence.arrival_s) * 1e3
        assert seed is not None  # `submit` draws one
        n_prompt, numbers = sequence.n_prompt, self._info.numeric_fingerprint
        digest = self._kv.key_of(sequence, n_prompt).hex()
        self._events.append(
            Started(
                request_id, seed, n_prompt, sequence.cached_tokens, queue_ms, numbers, sequence.n_resumed, digest
            )
        )  # fmt: skip

    def _fail(self, sequence: Sequence) -> None:
        """The model broke down on this request: end all its samples with an error, and only them."""
        request_id = sequence.request.request_id
        samples = self._live.get(request_id)
        if samples is None:
            return  # a sibling broke down in this very step and took the request with it
        for sample in list(samples):
            self._release(sample)
        self._events.append(Failed(request_id, *_breakdown(sequence)))

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        self._manager.end(sequence)
        request_id = sequence.request.request_id
        samples = self._live[request_id]
        samples.remove(sequence)
        if not samples:
            del self._live[request_id]
            self._unstarted.discard(request_id)

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        self._release(sequence)
        now = self._clock()
        first = sequence.first_scheduled_s if sequence.first_scheduled_s is not None else now
        token = sequence.first_token_s if sequence.first_token_s is not None else now
        timings = sequence.timings
        timings.queue_ms = (first - sequence.arrival_s) * 1e3
        timings.prefill_ms = (token - first) * 1e3
        timings.decode_ms = (now - token) * 1e3
        usage = Usage(
            sequence.n_prompt, sequence.cached_tokens, sequence.n_output, sequence.preemptions, *_predicted(sequence),
            sequence.pauses, sequence.n_resumed,
        )  # fmt: skip
        request_id, index = sequence.request.request_id, sequence.index
        self._events.append(
            Finished(request_id, index, ending.reason, ending.matched_stop, usage, sequence.stats, timings)
        )


def _predicted(sequence: Sequence) -> tuple[int, int]:
    """Tokens of the request's prediction that were drafted and came out, and the others."""
    given = len(sequence.request.prediction_ids)
    used = sequence.stats.by_drafter.get(PredictionDrafter.name)
    accepted = 0 if used is None else min(given, used.num_accepted_draft_tokens)
    return accepted, given - accepted


def _breakdown(sequence: Sequence) -> tuple[str, str]:
    """Reason and message for a row in which no token was left to choose."""
    request, grammar = sequence.request, sequence.sampling.grammar
    if grammar is not None and grammar.error:
        return "GRAMMAR_TOO_COMPLEX", f"grammar: {grammar.error}; simplify it"
    if grammar is not None and request.sampling.allowed_token_ids:
        return "NO_TOKEN_LEFT", "sampling.allowed_token_ids: none of them may follow in the grammar here; allow more"
    return "MODEL_BROKEN", "the model gave no finite logit for this request; the weights or the prompt are broken"
