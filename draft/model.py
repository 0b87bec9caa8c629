"""Drafts with a small model of the target's vocabulary, level by level, with the target's sampling noise."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draft.growth import (
    MASKED_LOGIT,
    Drafted,
    Growth,
    PendingPrefill,
    add_children,
    feed,
    prefill_drafts,
    worth_expanding,
)
from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.models.decoder import TargetDecoder
from specdec.models.fim import FimParser
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling

MAX_LOGIT_GAP = 14.0  # in temperatures; a token this far below the best one wins by its noise once in a million rows
SPREAD_ROWS = 16  # rows of logits scattered into the whole vocabulary at a time; bounds the buffer
TAIL_TOKENS = 32  # tokens that a new `Tail` holds, at most
TAIL_PAGES = 4  # pages of a tail
TAIL_POOL = 8 * TAIL_PAGES  # pages of all tails; sequences without one are read whole


@dataclass(slots=True)
class Tail:
    """The end of a sequence's text, which the draft reads as a text of its own: its first token is at position 0."""

    pages: Seq[int]  # of its KV; no other sequence shares them
    prompt: list[int]  # its tokens when it began, without the pending one
    since: int  # index in the sequence of the pending token then; it and all later tokens follow `prompt`
    computed: int = 0  # leading tokens with KV

    def ids(self, tokens: Seq[int]) -> list[int]:
        """All of its tokens. tokens: the sequence's."""
        return [*self.prompt, *tokens[self.since :]]

    def pending(self, n_tokens: int) -> int:
        """Tokens without KV. n_tokens: of the sequence."""
        return len(self.prompt) + n_tokens - self.since - self.computed

    def is_spent(self, n_tokens: int) -> bool:
        """Whether a new tail must replace it: too many tokens lack KV, or its pages have no room for another tree."""
        pending = self.pending(n_tokens)
        return pending > 2 * TAIL_TOKENS or self.computed + pending + MAX_NODES > len(self.pages) * PAGE_SIZE


TABLE_SIZE = 1 << 16  # n-grams; a new one replaces what has its place
MAX_TEXT = 1024  # tokens at a prompt's end that are read
MAX_GUESSES = 2  # of a forward; a third gained nothing
FIRST_RATE = 0.3  # share of first guesses that are right, before observations
RATE_WEIGHT = 0.02  # of one guess in that share


class NgramTable:
    """The latest follower of each bigram and of each token.

    It reads the sequences' texts and the draft's own choices, right or wrong. Sequences of another salt see none of it.
    """

    def __init__(self) -> None:
        self.rate = FIRST_RATE
        """Share of first guesses that were the draft's choice."""
        self._table: list[tuple[tuple[object, ...], int] | None] = [None] * TABLE_SIZE
        self._n_read: dict[Sequence, int] = {}  # tokens read of each sequence

    def read(self, sequence: Sequence) -> None:
        """Read the tokens of ``sequence`` that were added since the last call."""
        tokens = sequence.tokens
        for at in range(self._n_read.get(sequence, max(2, len(tokens) - MAX_TEXT)), len(tokens)):
            self.add(sequence.salt, tokens[at - 2], tokens[at - 1], tokens[at])
        self._n_read[sequence] = len(tokens)

    def end(self, sequence: Sequence) -> None:
        """Forget how far ``sequence`` was read."""
        self._n_read.pop(sequence, None)

    def add(self, salt: str, before: int, last: int, token: int) -> None:
        """``token`` follows ``last``, which follows ``before``."""
        for ngram in ((salt, before, last), (salt, last)):
            self._table[hash(ngram) % TABLE_SIZE] = (ngram, token)

    def guess(self, salt: str, before: int, last: int) -> list[int]:
        """At most `MAX_GUESSES` tokens to follow ``before`` and ``last``; the bigram's follower before the token's."""
        found: list[int] = []
        while len(found) < MAX_GUESSES:
            for ngram in ((salt, before, last), (salt, last)):
                entry = self._table[hash(ngram) % TABLE_SIZE]
                if entry is not None and entry[0] == ngram:
                    break
            else:
                break
            before, last = last, entry[1]
            found.append(last)
        return found

    def observe(self, guessed: Seq[int], chosen: int) -> None:
        """Record what the draft chose where ``guessed`` was the guess."""
        if guessed:
            self.rate += RATE_WEIGHT * ((guessed[0] == chosen) - self.rate)


class ModelDrafter(ModelBasedDrafter):
    """Proposes the top-w of log q / T + G under the request's own filters, where G is the noise the target will
    use: a without-replacement sample ordered by the chance of holding the target's choice (Daliri et al.,
    arXiv 2408.07978). With T = 0 these are simply the w likeliest tokens.

    Its KV is in its own pool under the shared page table: slot s of a sequence is slot s in both. Committed tokens
    without KV (a prompt, an accepted run) are computed when it proposes, before the first level. For a task with
    ``tail`` it reads the end of the text alone (`Tail`).

    tail_pages: pages of the pool that are in no page table, `TAIL_PAGES` for each tail. fim: finds the text before the
    cursor, whose end is read in a fill-in-the-middle request.
    target_size: rows of the target's output table; higher ids, padding of the draft's table, are never proposed.
    output_ids: int32, increasing, the tokens of the draft's output table if that was cut; others are never proposed.
    """

    name = "model"

    def __init__(
        self, decoder: TargetDecoder, sampler: Sampler, target_size: int, output_ids: Tensor | None = None,
        tail_pages: Seq[int] = (), fim: FimParser | None = None,
    ) -> None:  # fmt: skip
        self._decoder, self._sampler, self._target_size = decoder, sampler, target_size
        self._output_ids = None if output_ids is None else output_ids.numpy().astype(np.intp)
        self._spread = torch.full((SPREAD_ROWS, target_size), MASKED_LOGIT) if output_ids is not None else None
        self._drafted: dict[Sequence, Drafted] = {}  # until the step's tokens are committed
        self._table = NgramTable()
        self._tails: dict[Sequence, Tail] = {}
        self._fim = fim
        self._free_tails = [tail_pages[at : at + TAIL_PAGES] for at in range(0, len(tail_pages), TAIL_PAGES)]

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Keep the KV of drafted tokens that were committed."""
        drafted = self._drafted.pop(sequence, None)
        if drafted is not None:
            text = self._text(sequence)
            text.reached(drafted.computed(text.ids, text.start))

    def end(self, sequence: Sequence) -> None:
        self._drafted.pop(sequence, None)
        self._table.end(sequence)
        self._drop_tail(sequence)

    def pending_prefill(self, sequence: Sequence) -> int:
        return len(sequence.tokens) - sequence.draft_computed

    def tail_prefill(self, sequence: Sequence) -> int:
        n, tail = len(sequence.tokens), self._tails.get(sequence)
        if tail is not None:
            return TAIL_TOKENS if tail.is_spent(n) else tail.pending(n)
        pending = n - sequence.draft_computed
        return TAIL_TOKENS if self._free_tails and pending > 2 * TAIL_TOKENS else pending

    def warm_up(self, rows: int) -> None:
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // PAGE_SIZE))))
        self._decoder.forward(ForwardBatch.build([entry]), list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        texts = [self._begin(task) for task in tasks]
        growing, pending, prefilling = [], [], []
        for task, tree, text in zip(tasks, trees, texts, strict=True):
            # The draft's embedding may lack a token: the target's may be larger, by padding.
            if text is None or max(text.ids[text.start :]) >= self._decoder.config.vocab_size:
                task.begun = False
                continue
            if task.max_nodes > 0 < task.max_depth:
                growing.append(Growth(task, tree, len(text.ids) - 1, text.pages, [text.ids[-1]]))
                pending.append(text)
            elif task.prefill:
                text.end = min(text.start + task.prefill, len(text.ids) - 1)
                prefilling.append(text)
        begun = growing
        self._look_ahead(growing)
        for growth, text in zip(growing, pending, strict=True):
            text.ahead = growth.ahead
        logits = prefill_drafts(self._decoder, [*pending, *prefilling])
        while growing and logits is not None:
            growing = self._expand(growing, logits)
            self._look_ahead(growing)
            growing, logits = feed(self._decoder, growing)
        self._drafted |= {growth.task.sequence: growth.drafted for growth in begun}
        return trees

    def _look_ahead(self, growing: Seq[Growth]) -> None:
        """Set the tokens whose rows the next forward computes beside each frontier: guesses of the levels to come.

        The n-th guess is right with chance rate^n, and then saves the growth's share of a level. It is computed if that
        is worth more than a further row. Rows that fit without guesses fit with them, so guesses cut no tree.
        """
        decoder, rows = self._decoder, sum(len(growth.frontier) for growth in growing)
        free = decoder.max_rows - sum(len(growth.tokens) for growth in growing)  # `feed` computes an own node once
        for growth in growing:
            tree, task, best = growth.tree, growth.task, growth.frontier[0]
            self._table.read(task.sequence)
            growth.guessed = self._table.guess(task.sequence.salt, *_bigram(growth, best))
            cost = task.expansion.cost if task.expansion is not None else None
            room = min(
                task.max_depth - tree.depths[growth.anchors[best]] - 1,
                len(growth.pages) * PAGE_SIZE - growth.base - len(growth.tokens),
                decoder.max_logit_rows - rows,
                free,
            )
            count, chance = 0, 1.0
            while count < min(room, len(growth.guessed)):
                chance *= self._table.rate
                if cost and chance * cost.ms(rows) / len(growing) <= cost.ms(rows + 1) - cost.ms(rows):
                    break
                count, rows, free = count + 1, rows + 1, free - 1
            growth.ahead = growth.guessed[:count]

    def _begin(self, task: DraftTask) -> PendingPrefill | None:
        """The text that the draft reads for a task; None: it asks for a tail, and no pages are left for one."""
        sequence, n = task.sequence, len(task.sequence.tokens)
        tail = self._tails.get(sequence)
        if not task.tail:
            self._drop_tail(sequence)
        elif tail is None or tail.is_spent(n):
            if tail is None and not self._free_tails:
                return None
            pages, written = self._free_tails.pop() if tail is None else tail.pages, sequence.tokens[:-1]
            if self._fim is not None:
                parts = self._fim.parts(written)
                written = parts.prefix + parts.middle
            self._tails[sequence] = Tail(pages, written[1 - TAIL_TOKENS :], n - 1)
        return self._text(sequence)

    def _text(self, sequence: Sequence) -> PendingPrefill:
        """The sequence's text as the draft reads it: its tail if it has one, else the whole."""
        tail, tokens = self._tails.get(sequence), sequence.tokens

        def reached(upto: int) -> None:
            if tail is None:
                sequence.draft_computed = upto
            else:
                tail.computed = upto

        if tail is not None:
            ids = tail.ids(tokens)
            return PendingPrefill(ids, min(tail.computed, len(ids) - 1), tail.pages, reached)
        return PendingPrefill(tokens, min(sequence.draft_computed, len(tokens) - 1), sequence.pages, reached)

    def _drop_tail(self, sequence: Sequence) -> None:
        """Return the pages of the sequence's tail, if it has one."""
        tail = self._tails.pop(sequence, None)
        if tail is not None:
            self._free_tails.append(tail.pages)

    def _expand(self, growing: Seq[Growth], logits: Tensor) -> list[Growth]:
        """Add the children of all frontier nodes, and of those behind a right guess; returns the growths to expand
        further.

        logits: as from `feed`.
        """
        rows = [g.row(g.tree.path_tokens(g.anchors[node])) for g in growing for node in g.frontier]
        starts = [0, *accumulate(len(g.frontier) + len(g.ahead) for g in growing)]
        asked = [at + i for at, g in zip(starts, growing, strict=False) for i in range(len(g.frontier))]
        frontiers = logits[: len(asked)] if asked[-1] < len(asked) else logits[asked]  # a view where it can be
        children = iter(self._children(frontiers, rows, max(growth.task.width for growth in growing)))
        for start, growth in zip(starts, growing, strict=False):
            own = [next(children) for _ in growth.frontier]
            if own[0]:
                self._table.observe(growth.guessed, own[0][0][0])
            behind = logits[start + len(own) : start + len(own) + len(growth.ahead)]
            growth.advance(self._add(growth, own))
            self._follow(growth, behind)
        return worth_expanding(growing)

    def _follow(self, growth: Growth, logits: Tensor) -> None:
        """Expand the frontier without a forward while it is a guessed node alone, so guesses change no tree.

        logits: of the rows ahead.
        """
        for i, token in enumerate(growth.ahead):
            if len(growth.frontier) != 1:
                return
            node = growth.frontier[0]
            if growth.tokens[node] != token or growth.parents[node] != growth.chain[-1]:
                return
            growth.chain.append(node)
            row = growth.row(growth.tree.path_tokens(growth.anchors[node]))
            growth.advance(self._add(growth, self._children(logits[i : i + 1], [row], growth.task.width)))

    def _children(self, logits: Tensor, rows: Seq[RowSampling], width: int) -> list[list[tuple[int, float]]]:
        """As `Sampler.children`, from logits of the draft's output table."""
        ids, spread = self._output_ids, self._spread
        if ids is None or spread is None:
            return self._sampler.children(logits[:, : self._target_size], rows, width)
        if all(row.edits is None and row.policy.temperature == 0 for row in rows):  # independent of the target's ids
            found = self._sampler.children(logits, rows, width)
            return [[(int(ids[token]), logprob) for token, logprob in row] for row in found]
        found, into = [], spread.numpy()
        for at in range(0, len(rows), SPREAD_ROWS):
            some = rows[at : at + SPREAD_ROWS]
            for i, row in enumerate(some):
                values = logits[at + i].numpy()
                if row.edits is None and row.policy.temperature > 0:
                    least = values.max() - MAX_LOGIT_GAP * row.policy.temperature
                    values = np.where(values >= least, values, MASKED_LOGIT)
                into[i, ids] = values
            found += self._sampler.children(spread[: len(some)], some, width)
        return found

    def _add(self, growth: Growth, children: Seq[Seq[tuple[int, float]]]) -> list[int]:
        """Add the draft's choices to the table, then the children as `add_children` does."""
        for node, options in zip(growth.frontier, children, strict=True):
            if options:
                self._table.add(growth.task.sequence.salt, *_bigram(growth, node), options[0][0])
        return add_children(growth, children)


def _bigram(growth: Growth, node: int) -> tuple[int, int]:
    """The token before ``node`` and its own. A text of one token is its own predecessor."""
    before = growth.tokens[growth.parents[node]] if node else growth.task.sequence.tokens[-2:][0]
    return before, growth.tokens[node]
