"""What a step keeps about one sequence beside its tokens and pages: sampling, text, figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from specdec.config import SpeculationConfig
from specdec.control.inputs import SequenceHistory
from specdec.engine.text_stops import TextStream
from specdec.grammar.token_healing import HealedStart
from specdec.models.tokenizer import Tokenizer
from specdec.sampling import SequenceSampling, TokenGrammar
from specdec.sequence import Sequence
from specdec.tree import TokenTree
from specdec.types import (
    Delta,
    DrafterStats,
    FinishReason,
    SpeculationMode,
    SpeculationParams,
    SpeculationStats,
    Timings,
    TokenLogprobs,
)


@dataclass(frozen=True, slots=True)
class DraftCaps:
    """Most draft nodes of a step, most levels, and most children of a node."""

    nodes: int
    depth: int
    width: int

    @staticmethod
    def of(wish: SpeculationParams, ours: SpeculationConfig) -> DraftCaps:
        """What a request wishes, and where it does not say, what the engine's configuration says."""
        forced = wish.mode is SpeculationMode.ON
        nodes, depth = (ours.fixed_nodes, ours.fixed_depth) if forced else (ours.max_nodes, ours.max_depth)
        return DraftCaps(
            nodes if wish.max_nodes is None else wish.max_nodes,
            depth if wish.max_depth is None else wish.max_depth,
            ours.width if wish.width is None else wish.width,
        )


@dataclass(slots=True)
class Ending:
    """Why a sequence ended, and the stop that did it."""

    reason: FinishReason
    matched_stop: str | int | None = None


@dataclass(slots=True)
class SequenceState:
    """A running sequence as the step sees it. `take` commits tokens in order and decides where it ends."""

    sequence: Sequence
    sampling: SequenceSampling
    text: TextStream
    eos_ids: frozenset[int]
    max_context: int
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    timings: Timings = field(default_factory=Timings)
    ending: Ending | None = None
    control: SequenceHistory | None = None
    caps: DraftCaps | None = None  # once it was to draft
    finishing: bool = False  # its time is over and it only goes on to the end of its line
    start: HealedStart | None = None  # what its first tokens must spell, until they have
    free: Callable[[], SequenceSampling] | None = None  # its sampling without that

    @staticmethod
    def create(
        sequence: Sequence,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_context: int,
        grammar: TokenGrammar | None = None,
    ) -> SequenceState:
        """A fresh state for ``sequence``; ``grammar``: what its output must match, at its start."""
        request = sequence.request

        def sampling(bound: TokenGrammar | None) -> SequenceSampling:
            return SequenceSampling(
                request.sampling, request.stopping, sequence.seed, vocab_size, tokenizer.eos_ids, request.prompt_ids,
                bound,
            )  # fmt: skip

        text = TextStream(tokenizer, request.stopping, request.output, len(request.healing_prefix))
        state = SequenceState(sequence, sampling(grammar), text, frozenset(tokenizer.eos_ids), max_context)
        if isinstance(grammar, HealedStart):
            state.start, state.free = grammar, lambda: sampling(None)
        return state

    @property
    def room(self) -> int:
        """Tokens this sequence may still emit."""
        sequence, limit = self.sequence, self.sequence.request.stopping.max_tokens
        room = self.max_context - len(sequence.tokens)
        return room if limit is None else min(room, limit - sequence.n_output)

    @property
    def speculates(self) -> bool:
        """Whether drafts may be verified for it at all."""
        return self.sequence.request.speculation.mode is not SpeculationMode.OFF

    def take(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        """Append verified tokens one by one until they are used up or the sequence ends."""
        sequence, pieces, taken, cut = self.sequence, [], 0, False
        for token in tokens:
            sequence.tokens.append(token)
            taken += 1
            self.ending = self._token_ending(token)
            if self.ending is None or sequence.request.stopping.include_stop:
                piece = self.text.push(token)
                pieces.append(piece.text)
                if piece.reason is not None:
                    self.ending, cut = Ending(piece.reason, piece.stop), True
            if self.ending is None and self.room <= 0:
                self.ending = Ending(FinishReason.LENGTH)
            if self.ending is not None:
                break
        if self.ending is not None and not cut:
            pieces.append(self.text.flush())
        self.sampling.commit(tokens[:taken])
        self._release_start()
        return Delta(sequence.request.request_id, sequence.index, tokens[:taken], "".join(pieces), logprobs[:taken])

    def _release_start(self) -> None:
        """Once its start is spelled a sequence is sampled like any other, at no cost for having had one."""
        if self.start is not None and self.start.done:
            assert self.free is not None  # made with the start
            self.sampling, self.start = self.free(), None
            self.sampling.commit(self.sequence.tokens[self.sequence.n_prompt :])

    def expired(self, now: float) -> Ending | None:
        """How the sequence ends at ``now`` (monotonic seconds) if its time is over. One that may finish its line is
        told to, and ends with the token that does."""
        sequence, stopping = self.sequence, self.sequence.request.stopping
        if sequence.deadline is not None and now >= sequence.deadline:
            return Ending(FinishReason.DEADLINE)
        limit, decode = stopping.time_limit_s, stopping.decode_limit_s
        late = limit is not None and now >= sequence.arrival_s + limit
        if decode is not None and sequence.first_token_s is not None:
            late = late or now >= sequence.first_token_s + decode
        if not late:
            return None
        if not (stopping.finish_line and sequence.n_output):
            return Ending(FinishReason.TIME_LIMIT)
        if not self.finishing:
            self.finishing = True
            self.text.end_at_line()
        return None

    def rest(self) -> Delta:
        """The text that was held back, for a sequence that ends between steps."""
        return Delta(self.sequence.request.request_id, self.sequence.index, [], self.text.flush())

    def _token_ending(self, token: int) -> Ending | None:
        stopping = self.sequence.request.stopping
        if self.sequence.n_output <= stopping.min_tokens:
            return None
        if token in stopping.stop_token_ids:
            return Ending(FinishReason.STOP_TOKEN, token)
        if token in self.eos_ids and not stopping.ignore_eos:
            return Ending(FinishReason.EOS, token)
        return None

    def record(self, tree: TokenTree, accepted: list[int], taken: int, draft_ms: float, verify_ms: float) -> None:
        """Count one verify step; of the ``accepted`` nodes only those whose token was taken count."""
        used, stats = accepted[:taken], self.stats
        stats.num_steps += 1
        self.timings.draft_ms += draft_ms
        self.timings.verify_ms += verify_ms
        if len(tree) == 1:
            return
        stats.num_spec_steps += 1
        stats.num_draft_tokens += len(tree) - 1
        stats.num_accepted_draft_tokens += len(used)
        while len(stats.acceptance_histogram) <= len(used):
            stats.acceptance_histogram.append(0)
        stats.acceptance_histogram[len(used)] += 1
        for node in range(1, len(tree)):
            for source in tree.sources[node]:
                stats.by_drafter.setdefault(source, DrafterStats()).num_draft_tokens += 1
        for node in used:
            for source in tree.sources[node]:
                stats.by_drafter[source].num_accepted_draft_tokens += 1
