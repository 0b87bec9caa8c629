"""Drafts with a small model of another vocabulary: it reads text, and its drafts are retokenised for the target."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass

from torch import Tensor

from draft.model import WIDEST_LEVEL, Drafted, Growth, PendingPrefill, feed, going_on, prefill_drafts
from draft.protocol import DraftTask, ModelBasedDrafter
from draft.retokenize import RetokenizedText, VocabularyBridge, add_canonical_path, best_tokens
from specdec.core.kv_cache import KvCacheManager, PagedTokens
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.models.decoder import TargetDecoder
from specdec.models.tokenizer import Tokenizer
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling

TOGETHER = 16  # sequences drafted in one go: bounds the table of logits in the target's vocabulary
SPARE = 3  # tokens looked at beyond the width, in place of those without a twin
SPELLED_ON = 0.95  # chance that the rest of a word follows once its first token is right

_Offer = tuple[int, float, int, int, float]
"""(rank, minus the log of the chance to be reached, own parent, token of the target, log-probability)"""


@dataclass(slots=True)
class _Reader:
    """The draft's side of a sequence: its text, how many of the target's tokens it has read, and how many tokens of the
    text the prefix cache knew and how many have their KV.

    ``paged`` is a sequence of the draft's tokens, as the block tables know it; None until it is needed. ``drafted``:
    what was drafted last.
    """

    text: RetokenizedText
    n_read: int
    cached: int
    computed: int = 0
    paged: PagedTokens | None = None
    drafted: Drafted | None = None


PROMPT_TOKENS = 256  # least tokens of a long prompt that the draft computes: further context hardly helps it


class CrossVocabularyDrafter(ModelBasedDrafter):
    """A level takes the draft's logits over to the tokens both vocabularies have (token-level intersection), where the
    request's own filters and the target's noise choose the children; a favourite without a twin is proposed in the
    target's spelling, as a path. In the end the likeliest path is put into the target's own tokenisation, which
    joins what the draft says in two words.

    Its KV lies in pages of its own, since the two count tokens differently, with a prefix cache of its own.

    target_size: rows of the target's output table. max_batch: sequences drafted together at most. prompt_tokens: of a
    long prompt at least so many last tokens are computed (`RetokenizedText`); 0: all.
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
        prompt_tokens: int = PROMPT_TOKENS,
    ) -> None:
        self._decoder, self._sampler, self._target, self._draft = decoder, sampler, target, draft
        self._bridge = VocabularyBridge(target, draft, target_size, decoder.config.vocab_size)
        self._kv = KvCacheManager(decoder.pool.pages, prefix_cache=True)
        self._logits = self._bridge.buffer(WIDEST_LEVEL * min(max_batch, TOGETHER))
        self._prompt_tokens = prompt_tokens
        self._readers: dict[Sequence, _Reader] = {}

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence; its full pages stay to be found."""
        reader = self._readers.pop(sequence, None)
        if reader is not None and reader.paged is not None:
            self._kv.release(reader.paged)

    def pending_prefill(self, sequence: Sequence) -> int:
        """About how many of its tokens it must read."""
        reader = self._readers.get(sequence) or self._start_reading(sequence)
        known = reader.computed if reader.paged is not None else reader.cached
        return len(sequence.tokens) - reader.n_read + len(reader.text.ids) - known

    def warm_up(self, rows: int) -> None:
        """One level for ``rows`` sequences: rows, logits, and their way into the target's vocabulary."""
        pages = list(range(-(-rows // PAGE_SIZE)))
        batch = ForwardBatch.build([BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, pages)])
        logits = self._decoder.forward(batch, list(range(rows)))
        for row in range(rows):
            self._bridge.translate(logits[row : row + 1], self._logits)

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Read what is new, then grow every tree by levels until deeper ones do not pay."""
        return [tree for at in range(0, len(tasks), TOGETHER) for tree in self._propose(tasks[at : at + TOGETHER])]

    def _propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        growing, pending = [], []
        for task, tree in zip(tasks, trees, strict=True):
            reader = self._readers.get(task.sequence) or self._start_reading(task.sequence)
            proposes = task.max_nodes > 0 < task.max_depth
            if not (proposes or task.prefill) or not self._read_new(reader, task):
                continue
            assert reader.paged is not None  # `_read_new` saw to it
            ids = reader.text.ids
            if proposes:
                growing.append((Growth(task, tree, len(ids) - 1, reader.paged.pages, [ids[-1]]), reader))
            end = None if proposes else min(reader.computed + task.prefill, len(ids) - 1)
            pending.append(self._pending(reader, end))
        logits = prefill_drafts(self._decoder, pending)
        current = [growth for growth, _ in growing]
        likelihoods: dict[int, list[float]] = {id(growth): [0.0] for growth in current}
        while current and logits is not None:
            current = self._expand(current, logits, likelihoods)
            current, logits = feed(self._decoder, current)
        for growth, reader in growing:
            reader.drafted = growth.drafted
            add_canonical_path(growth, likelihoods[id(growth)], self._target)
        return trees

    def _start_reading(self, sequence: Sequence) -> _Reader:
        """Start to follow a sequence; no pages yet, since many are never drafted for."""
        text = RetokenizedText(self._target, self._draft, self._bridge, sequence.tokens, self._prompt_tokens)
        cached = self._kv.cached_tokens(text.ids[: text.stable], sequence.salt)
        reader = self._readers[sequence] = _Reader(text, len(sequence.tokens), cached)
        return reader

    def _read_new(self, reader: _Reader, task: DraftTask) -> bool:
        """Take in what was committed since; whether a proposal can begin here."""
        tokens = task.sequence.tokens
        reader.computed = min(reader.computed, reader.text.extend(tokens[reader.n_read :]))
        reader.n_read = len(tokens)
        ids, drafted, reader.drafted = reader.text.ids, reader.drafted, None
        if drafted is not None and ids:
            reader.computed = drafted.computed(ids, reader.computed)
        if not reader.text.whole or not ids:
            return False
        if reader.paged is None:
            # Pages are found by tokens that never change: only stable ones, or none.
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
        """Let other texts find the full pages of what will not change any more."""
        paged, text = reader.paged, reader.text
        assert paged is not None
        if len(paged.tokens) < text.stable:
            paged.tokens += text.ids[len(paged.tokens) : text.stable]
        paged.n_computed = min(reader.computed, text.stable, len(paged.tokens))
        self._kv.publish(paged)

    def _expand(
        self, growing: Seq[Growth], logits: Tensor, likelihoods: dict[int, list[float]]
    ) -> list[Growth]:  # fmt: skip
        """Give frontier nodes their children; returns the growths that can go on."""
        rows = [g.row(g.tree.path_tokens(g.anchors[node])) for g in growing for node in g.frontier]
        width = max(growth.task.width for growth in growing)
        children, favourites = self._children(logits, rows, width)
        at = 0
        for growth in growing:
            known, room = likelihoods[id(growth)], growth.level_room
            fresh: list[int] = []
            offered: list[_Offer] = []
            for node in growth.frontier:
                favourite, chance = favourites[at]
                if self._bridge.to_target[favourite] < 0:
                    fresh += self._spell_out(growth, node, favourite, chance, known)
                offered += _offers(growth, node, children[at])
                at += 1
            offered.sort()
            growth.advance(fresh + self._twins(growth, offered[: max(0, room - len(fresh))], known))
        return going_on(growing)

    def _children(
        self, logits: Tensor, rows: Seq[RowSampling], width: int
    ) -> tuple[list[list[tuple[int, float]]], list[tuple[int, float]]]:
        """Per row of the draft's logits the best tokens of the target with their log-probabilities, and the draft's own
        favourite with its probability."""
        if any(row.edits is not None or row.policy.temperature > 0 for row in rows):
            children = self._sampler.children(self._bridge.translate(logits, self._logits), rows, width)
            return children, best_tokens(logits)
        # Nothing depends on the target's ids: the draft's own ranking will do, and its table is a third as long.
        own = self._sampler.children(logits, rows, width + SPARE)
        to_target = self._bridge.to_target
        twins = [[(to_target[token], logprob) for token, logprob in row if to_target[token] >= 0] for row in own]
        return [row[:width] for row in twins], [(row[0][0], math.exp(row[0][1])) for row in own]

    def _twins(self, growth: Growth, offered: Seq[_Offer], likelihoods: list[float]) -> list[int]:
        fresh = []
        for rank, _, parent, token, logprob in offered:
            anchor = growth.offer(growth.anchors[parent], token, math.exp(logprob), rank)
            if anchor >= 0:
                fresh.append(growth.add(parent, self._bridge.to_draft[token], anchor))
                likelihoods.append(logprob)
        return fresh

    def _spell_out(
        self, growth: Growth, parent: int, token: int, chance: float, likelihoods: list[float]
    ) -> list[int]:  # fmt: skip
        """A favourite that the target spells with several tokens."""
        anchor = growth.anchors[parent]
        path, parts = growth.tree.path_tokens(anchor), self._bridge.spelled(token)
        if not parts or not all(growth.permits([*path, *parts[:i]], part) for i, part in enumerate(parts)):
            return []
        for i, part in enumerate(parts):
            anchor = growth.offer(anchor, part, SPELLED_ON if i else chance)
            if anchor < 0:
                return []
        likelihoods.append(math.log(max(chance, 1e-9)))
        return [growth.add(parent, token, anchor)]


def _offers(growth: Growth, node: int, options: Seq[tuple[int, float]]) -> list[_Offer]:
    above = growth.tree.scores[growth.anchors[node]]
    return [
        (rank, -above - logprob, node, token, logprob)
        for rank, (token, logprob) in enumerate(options[: growth.task.width])
    ]
