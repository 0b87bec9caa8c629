"""What a step keeps about one sequence beside its tokens and pages: sampling, text, figures."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.control.sequence_control import SequenceControl
from specdec.models.tokenizer import Tokenizer
from specdec.sampling import SequenceSampling
from specdec.sampling.token_grammar import TokenGrammar
from specdec.sequence import Sequence
from specdec.step.text_stream import TextStream
from specdec.tree import TokenTree
from specdec.types import (
    Delta,
    DrafterStats,
    FinishReason,
    SpeculationMode,
    SpeculationStats,
    Timings,
    TokenLogprobs,
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
    control: SequenceControl | None = None

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
        sampling = SequenceSampling(
            request.sampling,
            request.stopping,
            sequence.seed,
            vocab_size,
            tokenizer.eos_ids,
            request.prompt_ids,
            grammar,
        )
        text = TextStream(tokenizer, request.stopping, request.output)
        return SequenceState(sequence, sampling, text, frozenset(tokenizer.eos_ids), max_context)

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
        sequence, pieces, taken = self.sequence, [], 0
        for token in tokens:
            sequence.tokens.append(token)
            taken += 1
            self.ending = self._token_ending(token)
            if self.ending is None or sequence.request.stopping.include_stop:
                piece = self.text.push(token)
                pieces.append(piece.text)
                if piece.stop is not None:
                    self.ending = Ending(FinishReason.STOP_STRING, piece.stop)
            if self.ending is None and self.room <= 0:
                self.ending = Ending(FinishReason.LENGTH)
            if self.ending is not None:
                break
        if self.ending is not None and self.ending.reason is not FinishReason.STOP_STRING:
            pieces.append(self.text.flush())
        self.sampling.commit(tokens[:taken])
        return Delta(sequence.request.request_id, sequence.index, tokens[:taken], "".join(pieces), logprobs[:taken])

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
