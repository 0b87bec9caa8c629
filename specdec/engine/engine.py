"""The engine. It takes requests and returns their events; one thread calls `step` in a loop."""

from __future__ import annotations

import logging
import math
from dataclasses import replace

from draft.head import HeadDrafter
from specdec.config import WeightDtype
from specdec.control.estimates.costs import CostTable
from specdec.control.estimates.learned import Learned
from specdec.control.prefill_pace import PrefillPace
from specdec.core.cache_events import CacheFollower
from specdec.core.sequence import Ending, Sequence, SequencePhase
from specdec.core.types import (
    EngineInfo,
    EngineLoad,
    FinishReason,
    Pooling,
    Request,
    RequestEvent,
    StepTrace,
    draw_seed,
    sample_seed,
    unstarted,
)
from specdec.engine.disk_cache import DiskCache
from specdec.engine.preparation import RequestPreparation, WaitingRequest
from specdec.engine.profile_costs import StepCosts
from specdec.engine.requests import RequestTable
from specdec.engine.scheduler import Scheduler, SchedulerLimits
from specdec.engine.speculation import EngineParts, LoadedDraft, Speculation
from specdec.engine.step import Step, StepResult
from specdec.engine.validation import check_requests
from specdec.engine.verify import Verifier
from specdec.errors import DuplicateRequestError, RequestError, StageError
from specdec.grammar.compiler import GrammarCompiler

__all__ = ["Engine", "EngineParts", "LoadedDraft"]

logger = logging.getLogger(__name__)

HALF_LIFE_S = 5.0  # of the token rate: smooth over bursts of accepted drafts, and current for load balancers


class Engine:
    """Serves requests by steps. Not thread-safe: the process that owns it calls it from one thread.

    `step` returns the events since the last call: per request one Started, then Deltas and one Finished per sample.
    """

    def __init__(self, parts: EngineParts) -> None:
        config = parts.config
        self._parts, self._kv = replace(parts, drafters=()), parts.kv  # a swap frees the old one's memory
        self._info = replace(parts.info, drafters=tuple(drafter.name for drafter in parts.drafters))
        limits = SchedulerLimits(
            max_batch=config.max_batch,
            max_step_rows=config.max_step_rows,
            prefill_chunk=config.prefill_chunk,
            max_context=parts.info.max_context,
            max_queued=parts.max_queued_requests,
            target_tpot_ms=config.target_tpot_ms,
        )
        costs = parts.costs or StepCosts(CostTable.guess(config.max_step_rows).as_dict())
        self._pace = PrefillPace(CostTable.from_dict(costs.verify, parts.control_params), parts.control_params)
        self._scheduler = Scheduler(parts.kv, limits, self._pace, parts.clock)
        self._verifier = parts.verifier or Verifier(parts.decoder, parts.sampler)
        self._speculation = Speculation(parts, costs)
        self._grammars = parts.grammars or GrammarCompiler(parts.tokenizer, parts.info.vocab_size)
        self._preparation = RequestPreparation(self._grammars, parts.max_queued_requests)
        self._requests = RequestTable()
        self._throughput, self._totals = Throughput(), EngineLoad()
        self._step = self._new_step()
        self.last_step: StepResult | None = None

    def _new_step(self) -> Step:
        speculation = self._speculation
        return Step(
            self._scheduler, self._kv, speculation.manager, speculation.drafting, self._verifier, speculation.trace,
            self._parts.clock, self._pace,
        )  # fmt: skip

    def submit(self, request: Request, waited_s: float = 0.0) -> None:
        """Queue ``request``, which arrived ``waited_s`` seconds ago: its place in the queue and its deadline count from
        then.

        Its grammar compiles while the engine steps. If the grammar is refused then, the request ends with `Failed`,
        which has the reason and the details of the error.

        Raises:
            InvalidRequestError, PromptTooLongError: it cannot be served as it is, or its grammar was refused before.
            FingerprintMismatchError: it resumes output that was computed with other bits.
            DuplicateRequestError: a request of the same id is in flight.
            QueueFullError: too many requests wait.
        """
        if not self._parts.trusts_requests:
            check_requests([request], self._info)
        if request.request_id in self._requests.live or request.request_id in self._preparation.waiting:
            raise DuplicateRequestError(f"request_id {request.request_id!r} is in flight; choose another")
        if request.sampling.seed is None:
            request = replace(request, sampling=replace(request.sampling, seed=draw_seed()))
        arrival_s = self._parts.clock() - waited_s
        waiting = WaitingRequest(request, arrival_s, self._preparation.start(request))
        if (disk := self._parts.disk) is not None:
            disk.set_idle(False)
            disk.end_loads()
            # A request that will be refused would evict pages for nothing
            full = self._scheduler.is_full or self._preparation.is_full
            if request.pooling is not Pooling.MEAN and not full:  # a mean needs every token's state
                self._read_pages(disk, waiting)
        if waiting.is_ready:
            self._admit(waiting)
        else:
            self._preparation.hold(waiting)

    def _read_pages(self, disk: DiskCache, waiting: WaitingRequest) -> None:
        """Begin to read its pages that only the disk has, or find the load that reads the first of them, unless the one
        that it waited for was for this very prompt."""
        request, ended = waiting.request, waiting.pages
        resumed = () if request.resume is None else request.resume.token_ids
        tokens = (*request.prompt_ids, *resumed)
        if ended is None or ended.load.tokens != tokens:
            waiting.pages = disk.start(tokens, request.cache_salt, reserve=len(self._scheduler.running))

    def _admit(self, waiting: WaitingRequest) -> None:
        """Queue a prepared request. Raises RequestError if it is refused; any other error ends it with `Failed`."""
        request = waiting.request
        try:
            sequences = [self._new_sequence(waiting, index) for index in range(request.sampling.n)]
        except RequestError:
            raise
        except Exception as error:
            self._fail_stage(request.request_id, error, "admission")
            return
        first = sequences[0]
        if first.ending is None:
            self._scheduler.add(sequences)  # the last call that may refuse: a refused request leaves no trace
        self._requests.add(request, sequences)
        if first.ending is not None:  # the tokens of a resumed request are the whole answer, so it has one sample
            try:
                self._start(first)
                self._requests.publish_held_text(first)
            except Exception as error:
                self._fail_sequence(first, error, "publishing")
            else:
                self._finish(first, first.ending)

    def _new_sequence(self, waiting: WaitingRequest, index: int) -> Sequence:
        request = waiting.request
        try:
            grammar = self._preparation.grammar(waiting)
        except RequestError:
            raise
        except Exception as error:
            raise StageError.of(error, "grammar") from error
        assert request.sampling.seed is not None  # `submit` draws one
        return Sequence(
            request,
            index,
            sample_seed(request.sampling.seed, index),
            waiting.arrival_s,
            self._parts.tokenizer,
            vocab_size=self._info.vocab_size,
            max_context=self._info.max_context,
            speculation=self._parts.config.speculation,
            grammar=grammar,
        )

    def abort(self, request_id: str) -> bool:
        """End a request; its pages are free on return, but for those being read from disk, which are cached once they
        are read. False if no such request is in flight."""
        if (waiting := self._preparation.drop(request_id)) is not None:
            self._finish_unprepared(waiting, FinishReason.ABORTED)
            return True
        sequences = list(self._requests.live.get(request_id, ()))
        for sequence in sequences:
            self._finish(sequence, Ending(FinishReason.ABORTED))
        return bool(sequences)

    def preempt_newest(self) -> None:
        """Preempt the least important decoding sequence, as a full cache would. For verification and tests.

        It skips sequences in prefill: one that is preempted often would never emit a token.
        """
        decoding = [seq for seq in self._scheduler.running if not seq.prefilling]
        if decoding:
            self._scheduler.preempt(decoding[-1])

    def has_work(self) -> bool:
        """Whether `step` would do anything."""
        return bool(self._requests or self._preparation.waiting)

    def step(self) -> list[RequestEvent]:
        """Run one step and return the events since the last one.

        An exception that belongs to one request ends that request with an error. Any other is raised: the engine is
        broken.
        """
        self._expire()
        if (disk := self._parts.disk) is not None:
            disk.end_loads()
        self._admit_prepared()
        if self._requests.live:
            result = self._step.run()
            self.last_step = result
            count_step(self._totals, result)
            self._report(result)
        if not self._requests.live:
            self._step.flush()
            if disk is not None:
                disk.set_idle(True)
        self._admit_prepared()  # before requests that arrive now take the places that this step has freed
        if not self._requests and self._preparation.waiting:
            self._preparation.wait()
        return self._requests.take_events()

    def _admit_prepared(self) -> None:
        """Queue prepared requests while there is room; none is refused because later ones have filled the queue."""
        disk, prepared = self._parts.disk, self._preparation.take_prepared()
        while not self._scheduler.is_full and (waiting := next(prepared, None)) is not None:
            if disk is not None and waiting.pages is not None:
                self._read_pages(disk, waiting)
                if not waiting.is_ready:
                    self._preparation.hold(waiting)
                    continue
            try:
                self._admit(waiting)
            except RequestError as error:
                self._requests.fail(waiting.request.request_id, error.reason, str(error), error.details)

    def _finish_unprepared(self, waiting: WaitingRequest, reason: FinishReason) -> None:
        queue_ms = (self._parts.clock() - waiting.arrival_s) * 1e3
        for event in unstarted(waiting.request.request_id, waiting.request, reason, queue_ms):
            self._requests.publish(event)

    def info(self) -> EngineInfo:
        """Facts that change only with the draft model."""
        return self._info

    def load(self) -> EngineLoad:
        """The engine's present load."""
        totals = self._totals
        load = replace(
            totals,
            steps_by_sequences=totals.steps_by_sequences.copy(),
            steps_by_rows=totals.steps_by_rows.copy(),
            running_requests=len({s.request.request_id for s in self._scheduler.running}),
            waiting_requests=self._scheduler.n_waiting_requests + len(self._preparation.waiting),
            free_pages=self._kv.n_free,
            total_pages=self._kv.n_total,
            tokens_per_second=self._throughput.per_second(self._parts.clock()),
            prompt_ms=self._pace.alone_ms(),
        )
        if (disk := self._parts.disk) is not None:
            disk.end_loads()
            disk.set_idle(not self._requests.live)  # a refused request ran no step
            load = disk.added_to(load)
        elif self._parts.config.kv_disk_bytes:
            load.disk_pages_missed = {"off": 1}
        return load

    def flush_cache(self) -> int:
        """Evict the cached pages that no running request uses, and erase those on disk; returns how many were
        evicted."""
        disk = self._parts.disk
        if disk is not None:
            disk.drop_loads()  # they hold pages
        count = self._kv.flush()
        if disk is not None:
            disk.erase()
        return count

    def follow_cache(self, follower: CacheFollower) -> None:
        """Report to ``follower`` every page that enters or leaves the prefix cache from now on."""
        self._kv.follow(follower)

    def load_draft(self, draft: str, dtype: WeightDtype | None) -> LoadedDraft:
        """Load a draft model or a feature head for `swap_draft`, next to the one in use. May be called from another
        thread.

        draft, dtype: as in the configuration, or a head's folder.

        Raises:
            ModelError: it cannot be loaded, or memory is short for both.
            ConfigError: it cannot draft for this target, this engine does not draft, or it does not keep the states
                that the head reads.
        """
        self._speculation.check_swap()
        assert self._parts.load_draft is not None  # checked above
        return self._parts.load_draft(draft, dtype)

    def swap_draft(self, draft: LoadedDraft | None) -> EngineInfo:
        """Replace the draft model or the feature head, or remove the draft model; returns the new `info`.

        The tokens of running requests do not change. A draft model or head that stays keeps what it has read; the
        controller starts again from its estimates. The old model's memory is free on return.

        Raises:
            ConfigError: this engine does not draft, or its next trace file cannot be written; nothing has changed.
        """
        self._speculation.check_swap()
        self._step.flush()
        self._speculation.swap(draft)
        names = tuple(drafter.name for drafter in self._speculation.drafters)
        if draft is not None and draft[1].name == HeadDrafter.name:
            info = replace(self._info, head=draft[0], head_acceptance=draft[1].acceptance)
        else:
            info = replace(self._info, draft=None if draft is None else draft[0])
            self._kv.forget_drafts()
            for sequence in self._requests.sequences():
                sequence.draft_computed = sequence.n_draft_published = 0
        self._info = replace(info, drafters=names)
        self._step = self._new_step()
        for sequence in self._requests.sequences():
            sequence.history = None
            if sequence.first_scheduled_s is not None:
                self._speculation.manager.begin(sequence)
        return self._info

    def trace(self, limit: int) -> list[StepTrace]:
        """Decisions and outcomes of the last ``limit`` steps, oldest first."""
        return self._speculation.trace.last(limit)

    def learned(self) -> dict[str, Learned]:
        """The controller's estimates by drafter."""
        return self._speculation.controller.estimates.learned()

    def close(self) -> None:
        """End every request, close the trace file, and write the profile cache and the pages that go to disk."""
        for request_id in [*self._requests.live, *self._preparation.waiting]:
            self.abort(request_id)
        self._step.flush()
        self._speculation.close()
        self._grammars.close()
        if self._parts.disk is not None:
            self._parts.disk.close()

    def _expire(self) -> None:
        """End the sequences whose deadline or time limit has passed."""
        now = self._parts.clock()
        for waiting in list(self._preparation.waiting.values()):
            if (reason := waiting.expired(now)) is not None:
                self._preparation.drop(waiting.request.request_id)
                self._finish_unprepared(waiting, reason)
        for sequence in self._requests.sequences():
            try:
                ending = sequence.expired(now)
                if ending is None or sequence.phase is SequencePhase.FINISHED:  # by the fault of another sample
                    continue
                if ending.reason is FinishReason.TIME_LIMIT:
                    self._requests.publish_held_text(sequence)
            except Exception as error:
                self._fail_sequence(sequence, error, "stop rules")
                continue
            self._finish(sequence, ending)

    def _report(self, result: StepResult) -> None:
        """Publish the events of a step."""
        now = self._parts.clock()
        for sequence in result.admitted:
            try:
                self._start(sequence)
            except Exception as error:
                result.fail(sequence, error, "publishing")
        for sequence in result.prefilled:
            self._finish(sequence, Ending(FinishReason.LENGTH))
        emitted = 0
        for sequence, delta in result.deltas:
            if sequence.first_token_s is None:
                sequence.first_token_s = now
            emitted += len(delta.token_ids)
            self._requests.publish(delta)
            if sequence.ending is not None:
                self._finish(sequence, sequence.ending)
        for sequence in result.broken:
            if self._release_all(sequence):
                self._requests.fail(sequence.request.request_id, *_breakdown(sequence))
        for sequence, fault in result.faults:
            self._fail_sequence(sequence, fault, fault.stage)
        self._throughput.add(emitted, now)

    def _start(self, sequence: Sequence) -> None:
        digest = self._kv.key_of(sequence, sequence.n_prompt).hex()
        if self._requests.start(sequence, self._info.numeric_fingerprint, digest):
            self._totals.prompt_tokens += sequence.n_prompt
            self._totals.prefix_hit_tokens += sequence.cached_tokens

    def _fail_sequence(self, sequence: Sequence, error: Exception, stage: str) -> None:
        """End only this sequence's request: one of its stages raised ``error``."""
        if self._release_all(sequence):
            self._fail_stage(sequence.request.request_id, error, stage)

    def _fail_stage(self, request_id: str, error: Exception, stage: str) -> None:
        """Publish `Failed` for a request without sequences, one of whose stages raised ``error``."""
        fault = StageError.of(error, stage)
        logger.error("request %s: %s", request_id, fault, exc_info=fault.__cause__ or fault)
        self._requests.fail(request_id, "INTERNAL", f"{fault}; only this request has ended")

    def _release_all(self, sequence: Sequence) -> bool:
        """Release all samples of a sequence's request. False: another sample has ended it, or the sequence's answer was
        complete before."""
        samples = self._requests.live.get(sequence.request.request_id)
        if samples is None or sequence.phase is SequencePhase.FINISHED:
            return False
        for sample in list(samples):
            self._release(sample)
        return True

    def _finish(self, sequence: Sequence, ending: Ending) -> None:
        self._release(sequence)
        self._requests.finish(sequence, ending, self._parts.clock())

    def _release(self, sequence: Sequence) -> None:
        self._scheduler.finish(sequence)
        self._requests.remove(sequence)
        try:
            self._speculation.manager.end(sequence)
        except Exception:
            logger.exception("request %s: its drafters failed to end", sequence.request.request_id)


def _breakdown(sequence: Sequence) -> tuple[str, str]:
    """Reason and message for a sequence that has no token to choose."""
    request, grammar = sequence.request, sequence.sampling.grammar
    if grammar is not None and grammar.error:
        return "GRAMMAR_TOO_COMPLEX", f"grammar: {grammar.error}; simplify it"
    if grammar is not None and request.sampling.allowed_token_ids:
        place = "in the grammar here" if request.grammar is not None else "here, where the thoughts end"
        fault = "spells the word in which the prompt ends" if request.healing_prefix else f"may follow {place}"
        return "NO_TOKEN_LEFT", f"sampling.allowed_token_ids: none of them {fault}; allow more"
    return (
        "MODEL_BROKEN",
        "the model returned no finite logit or hidden state for this request; the weights or the prompt are broken",
    )


class Throughput:
    """Exponentially decayed token rate."""

    def __init__(self) -> None:
        self._mass = 0.0
        self._at = -math.inf

    def add(self, tokens: int, now: float) -> None:
        """Count ``tokens`` emitted at ``now`` (monotonic seconds)."""
        self._decay(now)
        self._mass += tokens

    def per_second(self, now: float) -> float:
        """The decayed rate, the mass over the integral of the decay (half-life / ln 2)."""
        self._decay(now)
        return self._mass * math.log(2) / HALF_LIFE_S

    def _decay(self, now: float) -> None:
        self._mass *= 0.5 ** ((now - self._at) / HALF_LIFE_S)
        self._at = now


def count_power(counts: list[int], value: int) -> None:
    """Count ``value``, from 1, in a histogram whose bucket k holds those in (2^(k-1), 2^k]."""
    power = (value - 1).bit_length()
    counts += [0] * (power + 1 - len(counts))
    counts[power] += 1


def count_step(totals: EngineLoad, result: StepResult) -> None:
    """Add a step that computed anything to the sums in ``totals``."""
    if not result.times.rows:
        return
    totals.steps += 1
    totals.drafting_steps += result.times.draft_rows > 0
    totals.step_rows += result.times.rows
    totals.draft_rows += result.times.draft_rows
    totals.plan_ms += result.plan_ms
    totals.draft_ms += result.draft_ms
    totals.verify_ms += result.verify_ms
    totals.commit_ms += result.commit_ms
    totals.step_sequences += result.sequences
    count_power(totals.steps_by_sequences, result.sequences)
    count_power(totals.steps_by_rows, result.times.rows)
