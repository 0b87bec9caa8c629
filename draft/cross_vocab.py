"""Drafts with a small model of another vocabulary: text is retokenised for the draft, its drafts for the target."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from draft.growth import WIDEST_LEVEL, Drafted, Growth, PendingPrefill, feed, prefill_drafts, worth_expanding
from draft.protocol import DraftTask, ModelBasedDrafter
from draft.retokenize import RetokenizedText, VocabularyBridge, add_canonical_path
from specdec.core.kv_cache import KvCacheManager, PagedTokens
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.models.decoder import TargetDecoder
from specdec.models.tokenizer import Tokenizer
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling, SamplingPolicy

MAX_TOGETHER = 16  # sequences drafted together; bounds the buffer of logits in the target's vocabulary
SPARE_TOKENS = 3  # tokens considered beyond the width, to replace those without a twin
GREEDY = RowSampling(SamplingPolicy(0, temperature=0.0), 0)
REST_OF_TOKEN_CHANCE = 0.95  # that the target continues a draft token that it splits; a guess, later calibrated

_Offer = tuple[int, float, int, int, float]
"""(rank, minus the log of the chance of being reached, own parent, token of the target, log-probability)"""


@dataclass(slots=True)
class _Reader:
    """The draft's state of a sequence."""

    text: RetokenizedText
    n_read: int  # tokens of the target that `text` holds
    cached: int  # tokens of the text in the prefix cache when the sequence began
    computed: int = 0  # tokens of the text with KV
    paged: PagedTokens | None = None  # the draft's tokens and pages; None until the first proposal
    drafted: Drafted | None = None  # the last proposal


@dataclass(slots=True)
class _SpelledGrowth(Growth):
    """A growth with the draft's log-probability of each own node."""

    likelihoods: list[float] = field(default_factory=lambda: [0.0])


PROMPT_TOKENS = 256  # least tokens of a long prompt that the draft computes; more context hardly helps it


class CrossVocabularyDrafter(ModelBasedDrafter):
    """Drafts with a model of another vocabulary.

    The draft's logits are mapped to the tokens that both vocabularies share (token-level intersection), from which the
    request's filters and the target's noise choose the children. A best token without a twin is proposed as the path of
    the target's tokens for its text. At the end the likeliest path is tokenised again by the target's tokenizer, which
    may join tokens of the draft.

    The draft has its own pages and prefix cache, since the two models count tokens differently.

    target_size: rows of the target's output table. max_batch: sequences drafted together.
    """

    name = "model"

    def __init__(
        self,
        decoder: TargetDecoder,
        sampler: Sampler,
        target: Tokenizer,
        draft: Tokenizer,
        target_size: int,
        max_batch: int,
    ) -> None:
        self._decoder, self._sampler, self._target, self._draft = decoder, sampler, target, draft
        self._bridge = VocabularyBridge(target, draft, target_size, decoder.config.vocab_size)
        self._kv = KvCacheManager(decoder.pool.pages, prefix_cache=True)
        self._logits = self._bridge.buffer(WIDEST_LEVEL * min(max_batch, MAX_TOGETHER))
        self._readers: dict[Sequence, _Reader] = {}

    def end(self, sequence: Sequence) -> None:
        """Release the sequence's pages; full ones stay in the prefix cache."""
        reader = self._readers.pop(sequence, None)
        if reader is not None and reader.paged is not None:
            self._kv.release(reader.paged)

    def pending_prefill(self, sequence: Sequence) -> int:
        """See `ModelBasedDrafter`; an estimate, since tokens that are not retokenised yet count as one each."""
        reader = self._readers.get(sequence) or self._start_reading(sequence)
        known = reader.computed if reader.paged is not None else reader.cached
        return len(sequence.tokens) - reader.n_read + len(reader.text.ids) - known

    def warm_up(self, rows: int) -> None:
        """See `ModelBasedDrafter`; includes the translation of logits."""
        pages = list(range(-(-rows // PAGE_SIZE)))
        batch = ForwardBatch.build([BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, pages)])
        logits = self._decoder.forward(batch, list(range(rows)))
        for row in range(rows):
            self._bridge.translate(logits[row : row + 1], self._logits)

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        groups = (tasks[at : at + MAX_TOGETHER] for at in range(0, len(tasks), MAX_TOGETHER))
        return [tree for group in groups for tree in self._propose(group)]

    def _propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        growing, pending = [], []
        for task, tree in zip(tasks, trees, strict=True):
            reader = self._readers.get(task.sequence) or self._start_reading(task.sequence)
            proposes = task.max_nodes > 0 < task.max_depth
            task.begun = self._read_new(reader, task)
            if not task.begun:
                continue
            assert reader.paged is not None  # `_read_new` saw to it
            ids = reader.text.ids
            if proposes:
                growing.append((_SpelledGrowth(task, tree, len(ids) - 1, reader.paged.pages, [ids[-1]]), reader))
            end = None if proposes else min(reader.computed + task.prefill, len(ids) - 1)
            pending.append(self._pending(reader, end))
        logits = prefill_drafts(self._decoder, pending)
        current = [growth for growth, _ in growing]
        while current and logits is not None:
            current = self._expand(current, logits)
            current, logits = feed(self._decoder, current)
        for growth, reader in growing:
            reader.drafted = growth.drafted
            add_canonical_path(growth, growth.likelihoods, self._target)
        return trees

    def _start_reading(self, sequence: Sequence) -> _Reader:
        """The state of a new sequence. It has no pages before its first proposal, which many sequences never get."""
        text = RetokenizedText(self._target, self._draft, self._bridge, sequence.tokens, PROMPT_TOKENS)
        cached = self._kv.cached_tokens(text.ids[: text.stable], sequence.salt)
        reader = self._readers[sequence] = _Reader(text, len(sequence.tokens), cached)
        return reader

    def _read_new(self, reader: _Reader, task: DraftTask) -> bool:
        """Read the newly committed tokens; returns whether a proposal can start here."""
        tokens = task.sequence.tokens
        reader.computed = min(reader.computed, reader.text.extend(tokens[reader.n_read :]))
        reader.n_read = len(tokens)
        ids, drafted, reader.drafted = reader.text.ids, reader.drafted, None
        if drafted is not None and ids:
            reader.computed = drafted.computed(ids, reader.computed)
        if not reader.text.whole or not ids:
            return False
        if reader.paged is None:
            # The prefix cache finds pages by tokens, so these must not change any more.
            stable = tuple(ids[: reader.text.stable])
            paged = PagedTokens(stable, task.sequence.salt)
            if stable and self._kv.admit(paged) is None:
                return False
            reader.paged, reader.computed = paged, paged.n_computed
        needed = len(ids) + task.max_nodes + 1
        reader.computed = min(reader.computed, len(ids) - 1)
        return needed < self._decoder.max_positions and self._kv.ensure(reader.paged, needed)

    def _pending(self, reader: _Reader, end: int | None) -> PendingPrefill:
        def reached(upto: int) -> None:
            reader.computed = upto
            self._publish(reader)

        assert reader.paged is not None  # `_read_new` saw to it
        return PendingPrefill(reader.text.ids, reader.computed, reader.paged.pages, reached, end)

    def _publish(self, reader: _Reader) -> None:
        """Publish the full pages of stable tokens to the prefix cache."""
        paged, text = reader.paged, reader.text
        assert paged is not None
        if len(paged.tokens) < text.stable:
            paged.tokens += text.ids[len(paged.tokens) : text.stable]
        paged.n_computed = min(reader.computed, len(paged.tokens))
        self._kv.publish(paged)

    def _expand(self, growing: Seq[_SpelledGrowth], logits: Tensor) -> list[_SpelledGrowth]:
        """Add the children of all frontier nodes; returns the growths to expand further."""
        rows = [g.row(g.tree.path_tokens(g.anchors[node])) for g in growing for node in g.frontier]
        width = max(growth.task.width for growth in growing)
        children, best = self._children(logits, rows, width)
        at = 0
        for growth in growing:
            room = growth.level_room
            fresh: list[int] = []
            offered: list[_Offer] = []
            for node in growth.frontier:
                token, chance = best[at]
                if self._bridge.to_target[token] < 0:
                    fresh += self._add_spelled(growth, node, token, chance)
                above = growth.tree.scores[growth.anchors[node]]
                for rank, (twin, logprob) in enumerate(children[at][: growth.task.width]):
                    offered.append((rank, -above - logprob, node, twin, logprob))
                at += 1
            offered.sort()
            growth.advance(fresh + self._add_twins(growth, offered[: max(0, room - len(fresh))]))
        return worth_expanding(growing)

    def _children(
        self, logits: Tensor, rows: Seq[RowSampling], width: int
    ) -> tuple[list[list[tuple[int, float]]], list[tuple[int, float]]]:
        """Per row of the draft's logits: the target's best tokens (token, log-probability), and the draft's best
        (token, probability)."""
        own = self._sampler.children(logits, [GREEDY] * len(rows), width + SPARE_TOKENS)
        best = [(row[0][0], math.exp(row[0][1])) for row in own]
        if any(row.edits is not None or row.policy.temperature > 0 for row in rows):
            return self._sampler.children(self._bridge.translate(logits, self._logits), rows, width), best
        # Greedy rows do not depend on the target's ids, and the draft's own table is a third as long.
        to_target = self._bridge.to_target
        twins = [[(to_target[token], logprob) for token, logprob in row if to_target[token] >= 0] for row in own]
        return [row[:width] for row in twins], best

    def _add_twins(self, growth: _SpelledGrowth, offered: Seq[_Offer]) -> list[int]:
        """Add tokens that have a twin; returns the new own nodes."""
        fresh = []
        for rank, _, parent, token, logprob in offered:
            anchor = growth.offer(growth.anchors[parent], token, math.exp(logprob), rank)
            if anchor >= 0:
                fresh.append(growth.add(parent, self._bridge.to_draft[token], anchor))
                growth.likelihoods.append(logprob)
        return fresh

    def _add_spelled(self, growth: _SpelledGrowth, parent: int, token: int, chance: float) -> list[int]:
        """Add a draft token as the path of the target's tokens for its text; returns the new own node, if any."""
        anchor = growth.anchors[parent]
        path, parts = growth.tree.path_tokens(anchor), self._bridge.spelled(token)
        if not parts or not all(growth.permits([*path, *parts[:i]], part) for i, part in enumerate(parts)):
            return []
        for i, part in enumerate(parts):
            anchor = growth.offer(anchor, part, REST_OF_TOKEN_CHANCE if i else chance)
            if anchor < 0:
                return []
        growth.likelihoods.append(math.log(max(chance, 1e-9)))
        return [growth.add(parent, token, anchor)]
