"""One sample of a request: its tokens and pages, sampling, text, end, and statistics."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from specdec.config import SpeculationConfig
from specdec.control.inputs import SequenceHistory
from specdec.core.kv_cache import PagedTokens
from specdec.core.sampling import SequenceSampling, TokenGrammar
from specdec.core.text_stops import TextStream
from specdec.core.tree import TokenTree
from specdec.core.types import (
    POSITIONS,
    Delta,
    DrafterStats,
    FinishReason,
    Request,
    ResumeParams,
    SpeculationMode,
    SpeculationStats,
    Timings,
    TokenLogprobs,
)
from specdec.errors import InvalidRequestError, StageError
from specdec.grammar.thinking import ThinkingBudget
from specdec.models.embedding import Pooler
from specdec.models.tokenizer import Tokenizer


class SequencePhase(Enum):
    """State of a sequence; a preempted one is `WAITING` again."""

    WAITING = "waiting"
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(slots=True)
class Ending:
    """Why a sequence ended, and the stop string or token that matched."""

    reason: FinishReason
    matched_stop: str | int | None = None


FIXED_NODES = 7  # draft nodes per tree in mode ON, for requests that set no max_nodes
FIXED_DEPTH = 7  # draft tokens in a row in mode ON, for requests that set no max_depth


class Sequence(PagedTokens):
    """One sample. The prompt and the committed output are its ``tokens``. Times are monotonic seconds.

    seed: the sample's own (`core.types.sample_seed`). speculation: defaults of what the request leaves out.

    Raises:
        InvalidRequestError: the request cannot have produced the tokens that it resumes after.
    """

    def __init__(
        self,
        request: Request,
        index: int,
        seed: int,
        arrival_s: float,
        tokenizer: Tokenizer,
        *,
        vocab_size: int,
        max_context: int,
        speculation: SpeculationConfig,
        grammar: TokenGrammar | None = None,
    ) -> None:
        super().__init__(request.prompt_ids, request.cache_salt)
        self.request, self.index, self.seed, self.arrival_s = request, index, seed, arrival_s
        self._tokenizer, self._max_context = tokenizer, max_context
        self.n_prompt = len(self.tokens)
        self.pooler: Pooler | None = None
        if request.pooling is not None:
            self.pooler, self.n_pending = Pooler(request.pooling, self.n_prompt), 0
            self.most_cached = self.pooler.most_cached
        if grammar is None and request.sampling.thinking_budget >= 0 and tokenizer.thought_marks:
            grammar = ThinkingBudget(request, tokenizer, vocab_size)
        eos_ids = tokenizer.eos_ids
        self.sampling = SequenceSampling(
            request.sampling, request.stopping, seed, vocab_size, eos_ids, request.prompt_ids, grammar
        )
        self._stop_tokens = frozenset(request.stopping.stop_token_ids)
        self.text = TextStream(tokenizer, request.stopping, request.output, len(request.healing_prefix))
        self._limit_drafts(speculation)
        self.history: SequenceHistory | None = None  # the controller's record of it, once a decision includes it
        self.rank = (0, 0.0, 0)  # lower first: negated priority, deadline or end of patience, serial number
        self.due_s = 0.0  # from then on no less important sequence takes pages that it lacks
        self.queued_prefill = self.n_prompt - 1  # pending prefill tokens when it last entered the queue
        self.phase = SequencePhase.WAITING
        self.cached_tokens = 0  # prompt tokens from the prefix cache when it was first scheduled
        self.preemptions = self.pauses = 0
        self.ending: Ending | None = None
        self.finishing_line = False  # its time limit has passed and it continues to the end of its line
        self.deadline = None if request.deadline_s is None else arrival_s + request.deadline_s
        self.first_scheduled_s: float | None = None
        self.first_token_s: float | None = None
        self.stats, self.timings = SpeculationStats(), Timings()
        self.n_resumed = 0  # output tokens that came with the request
        self._unsent = ""  # text of resumed tokens that the caller does not have
        if request.resume is not None:
            self._resume(request.resume)

    def _limit_drafts(self, ours: SpeculationConfig) -> None:
        """Set the draft limits: the request's, else those of the configuration ``ours``."""
        wish = self.request.speculation
        forced = wish.mode is SpeculationMode.ON
        nodes = min(FIXED_NODES, ours.max_nodes) if forced else ours.max_nodes
        depth = min(FIXED_DEPTH, ours.max_depth) if forced else ours.max_depth
        self.drafts = ours.enabled and wish.mode is not SpeculationMode.OFF and self.pooler is None
        self.max_nodes = nodes if wish.max_nodes is None else wish.max_nodes
        self.max_depth = depth if wish.max_depth is None else wish.max_depth
        self.width = ours.width if wish.width is None else wish.width

    @property
    def n_output(self) -> int:
        """Committed output tokens."""
        return len(self.tokens) - self.n_prompt

    @property
    def room(self) -> int:
        """Tokens that the sequence may still emit."""
        limit = self.request.stopping.max_tokens
        room = self._max_context - len(self.tokens)
        return room if limit is None else min(room, limit - self.n_output)

    @property
    def was_set_aside(self) -> bool:
        """Whether it was preempted or paused before."""
        return self.preemptions > 0 or self.pauses > 0

    @property
    def prefill_only(self) -> bool:
        """Whether the request emits no token: it fills the prefix cache, or returns an embedding."""
        return self.pooler is not None or self.request.stopping.max_tokens == 0

    def pool(self, states: NDArray[np.float64]) -> None:
        """Add the final hidden states of further tokens to the embedding. states: [tokens, hidden]."""
        assert self.pooler is not None
        self.pooler.add(states)
        self.most_cached = self.pooler.most_cached

    def _resume(self, resume: ResumeParams) -> None:
        """Commit the resumed tokens as output. If they are the whole answer, `ending` is set."""
        tokens, grammar = list(resume.token_ids), self.sampling.grammar
        lawful = grammar is None or bool(grammar.mask(tokens).any())
        text, taken = self._read(tokens)
        had = len(text) if resume.text_characters is None else resume.text_characters
        problem = ""
        if taken < len(tokens):
            assert self.ending is not None
            problem = f"the answer ends at token {taken} of them ({self.ending.reason.value}); give no more than those"
        elif not lawful:
            problem = "the grammar does not allow them; give the tokens that came, with the same grammar"
        if problem:
            raise InvalidRequestError.of("resume.token_ids", problem)
        if had > len(text):
            problem = f"the tokens say {len(text)} characters so far, not {had}; give what came with them"
            raise InvalidRequestError.of("resume.text_characters", problem)
        self.n_resumed, self._unsent = taken, text[had:]

    def take(self, tokens: list[int], logprobs: list[TokenLogprobs]) -> Delta:
        """Commit verified tokens up to the one at which plain decode would end, if it is among them."""
        text, taken = self._read(tokens)
        unsent, self._unsent = self._unsent, ""
        return Delta(self.request.request_id, self.index, tokens[:taken], unsent + text, logprobs[:taken])

    def _read(self, tokens: list[int]) -> tuple[str, int]:
        """Append ``tokens`` up to the end of the output; returns their final text, and how many were appended."""
        try:
            text, taken = self._append(tokens)
        except Exception as error:
            raise StageError.of(error, "stop rules") from error
        self.sampling.commit(tokens[:taken])
        return text, taken

    def _append(self, tokens: list[int]) -> tuple[str, int]:
        """Append ``tokens`` to tokens and text, as `_read`."""
        stopping, pieces, taken, cut, room = self.request.stopping, [], 0, False, self.room
        for token in tokens:
            self.tokens.append(token)
            taken += 1
            self.ending = self._token_ending(token)
            if self.ending is None or stopping.include_stop:
                piece = self.text.push(token)
                pieces.append(piece.text)
                if piece.reason is not None:
                    self.ending, cut = Ending(piece.reason, piece.stop), True
            if self.ending is None and taken >= room:
                self.ending = Ending(FinishReason.LENGTH)
            if self.ending is not None:
                break
        if self.ending is not None and not cut:
            pieces.append(self.text.flush())
        return "".join(pieces), taken

    def _token_ending(self, token: int) -> Ending | None:
        stopping = self.request.stopping
        if self.n_output <= stopping.min_tokens:
            return None
        if token in self._stop_tokens:
            return Ending(FinishReason.STOP_TOKEN, token)
        if token in self._tokenizer.eos_ids and not stopping.ignore_eos:
            return Ending(FinishReason.EOS, token)
        return None

    def expired(self, now: float) -> Ending | None:
        """How the sequence ends at ``now`` (monotonic seconds), or None. If it may finish its line, it continues until
        the token that does."""
        stopping = self.request.stopping
        if self.deadline is not None and now >= self.deadline:
            return Ending(FinishReason.DEADLINE)
        limit, decode = stopping.time_limit_s, stopping.decode_limit_s
        late = limit is not None and now >= self.arrival_s + limit
        if decode is not None and self.first_token_s is not None:
            late = late or now >= self.first_token_s + decode
        if not late:
            return None
        if not (stopping.finish_line and self.n_output):
            return Ending(FinishReason.TIME_LIMIT)
        if not self.finishing_line:
            self.finishing_line = True
            self.text.end_at_line()
        return None

    def held_back(self) -> Delta:
        """The text that was held back, when the sequence ends between steps."""
        unsent, self._unsent = self._unsent, ""
        flushed = "" if self.ending is not None else self.text.flush()
        return Delta(self.request.request_id, self.index, [], unsent + flushed)

    def count_step(self, tree: TokenTree, accepted: list[int], draft_ms: float, verify_ms: float) -> None:
        """Count one step. accepted: nodes whose tokens were committed."""
        stats = self.stats
        stats.num_steps += 1
        self.timings.draft_ms += draft_ms
        self.timings.verify_ms += verify_ms
        if len(tree) == 1:
            return
        stats.num_spec_steps += 1
        stats.num_draft_tokens += len(tree) - 1
        stats.num_accepted_draft_tokens += len(accepted)
        while len(stats.acceptance_histogram) <= len(accepted):
            stats.acceptance_histogram.append(0)
        stats.acceptance_histogram[len(accepted)] += 1
        places = set()  # siblings are one proposal
        for sources, depth in zip(tree.sources, tree.depths, strict=True):
            for source in sources:
                if source not in stats.by_drafter:
                    stats.by_drafter[source] = DrafterStats()
                stats.by_drafter[source].num_draft_tokens += 1
                places.add((source, depth))
        for source, depth in places:
            if depth <= POSITIONS:
                stats.by_drafter[source].proposed_at[depth - 1] += 1
        for depth, node in enumerate(accepted, 1):
            for source in tree.sources[node]:
                stats.by_drafter[source].num_accepted_draft_tokens += 1
                if depth <= POSITIONS:
                    stats.by_drafter[source].accepted_at[depth - 1] += 1
