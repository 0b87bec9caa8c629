"""Drafts with a small model of the target's vocabulary, level by level, with the target's sampling noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from draft.guesses import NgramTable
from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.control.policies.how_deep import trees_to_expand
from specdec.core.kv_cache import common_length
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.models.decoder import TargetDecoder
from specdec.models.fim import FimParser
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling


@dataclass(slots=True)
class PendingPrefill:
    """A text that the draft model has not computed completely."""

    ids: Seq[int]  # all tokens, in the draft's vocabulary
    start: int  # the first token to compute; at most the last one
    pages: Seq[int]  # of its KV
    reached: Callable[[int], None]  # receives the number of leading tokens that have KV
    end: int | None = None  # where to stop in this step; None: after the last token, whose logits are needed
    ahead: Seq[
        int
    ] = ()  # tokens after the last one whose logits are needed too, masks or guesses; not counted as reached


def prefill_drafts(decoder: TargetDecoder, pending: Seq[PendingPrefill]) -> Tensor | None:
    """Compute ``pending`` in as many forwards as needed.

    Returns the logits of the last token and of those ahead of each text without an ``end``, float32 [rows, vocab], or
    None if there is no such text. They come from one forward, so that short texts repeat these rows beside longer ones.
    """
    whole, logits = [text for text in pending if text.end is None], None
    while True:
        parts = [text for text in pending if text.end is not None and text.start < text.end]
        if not parts and (logits is not None or not whole):
            return logits
        entries, done, total, complete = [], [], 0, 0
        rows: list[int] = []
        # Parts first: finished texts come again in every forward, and could leave them no rows.
        for text in [*parts, *whole]:
            chain = list(text.ids[text.start : text.end][: decoder.max_rows - total])
            if not chain:
                continue
            upto = text.start + len(chain)
            if upto == len(text.ids) and total + len(chain) + len(text.ahead) <= decoder.max_rows:
                chain += text.ahead
                rows += range(total + upto - text.start - 1, total + len(chain))
                complete += 1
            entries.append(BatchEntry(chain, list(range(-1, len(chain) - 1)), text.start, text.pages))
            total += len(chain)
            done.append((text, min(upto, len(text.ids) - 1)))
        found = decoder.forward(ForwardBatch.build(entries), rows)
        logits = found if whole and complete == len(whole) else None
        for text, upto in done:  # after the forward, which may fail
            text.start = upto
            text.reached(upto)


MASKED_LOGIT = -1e31  # samplers treat logits up to -1e30 as masked
MAX_LOGIT_GAP = 14.0  # in temperatures; a token this far below the best one wins by its noise once in a million rows
SPREAD_ROWS = 16  # rows of logits scattered into the whole vocabulary at a time; bounds the buffer
TAIL_TOKENS = 32  # tokens that a new `Tail` holds, at most
TAIL_PAGES = 4  # pages of a tail
TAIL_POOL = 8 * TAIL_PAGES  # pages of all tails; sequences without one are read whole
WIDEST_LEVEL = 4  # nodes expanded per level; further ones are too unlikely to be reached


@dataclass(frozen=True, slots=True)
class Drafted:
    """A drafted chain in the KV cache."""

    base: int  # slot of its first token, the root
    tokens: Seq[int]

    def computed(self, ids: Seq[int], computed: int) -> int:
        """Number of leading tokens of ``ids``, the committed text, that have KV; at most all but the last.

        computed: their number without the chain; less than ``base`` if tokens before the chain lost their KV.
        """
        if computed < self.base:
            return computed
        agreed = common_length(ids[self.base : min(self.base + len(self.tokens), len(ids) - 1)], self.tokens)
        return max(computed, self.base + agreed)


@dataclass(slots=True)
class Growth:
    """A proposed tree under construction, and the draft model's tree of its own tokens, whose node 0 is the root."""

    task: DraftTask
    tree: TokenTree  # the proposal, in the target's tokens
    base: int  # KV slot of the root
    pages: Seq[int]  # of the KV
    tokens: list[int]  # of the own nodes
    parents: list[int] = field(default_factory=lambda: [-1])  # of the own nodes
    anchors: list[int] = field(default_factory=lambda: [0])  # node of `tree` that each own node stands for
    chain: list[int] = field(default_factory=lambda: [0])  # own nodes whose KV is at slots base, base + 1, ...
    frontier: list[int] = field(default_factory=lambda: [0])  # own nodes to expand next, best first
    guessed: Seq[int] = ()  # tokens that may follow the best of the frontier
    ahead: Seq[int] = ()  # tokens whose rows are computed beside the frontier's

    def add(self, parent: int, token: int, anchor: int) -> int:
        """Add a node to the own tree."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.anchors.append(anchor)
        return len(self.tokens) - 1

    @property
    def drafted(self) -> Drafted:
        """The chain in the KV cache."""
        return Drafted(self.base, [self.tokens[node] for node in self.chain])

    def path(self, node: int) -> list[int]:
        """Own nodes from the root to ``node``, inclusive."""
        nodes = [node]
        while node > 0:
            node = self.parents[node]
            nodes.append(node)
        return nodes[::-1]

    def offer(self, parent: int, token: int, prob: float, rank: int = 0) -> int:
        """As `DraftTask.add`, with at most ``width`` children, since several own nodes may stand for ``parent``."""
        if self.tree.child(parent, token) is None and self.tree.parents.count(parent) >= self.task.width:
            return -1
        return self.task.add(self.tree, parent, token, prob, rank)

    def row(self, path: Seq[int]) -> RowSampling:
        """Sampling of the token after ``path``: tokens of ``tree`` below the root."""
        return sampling_row(self.task.sequence, path)

    def permits(self, path: Seq[int], token: int) -> bool:
        """Whether the request's masks and bans let the target choose ``token`` after ``path``."""
        row = self.row(path)
        if row.edits is None:
            return True
        mask = row.edits.mask if row.mask is None else row.mask
        if mask is not None and (token >= 32 * len(mask) or not int(mask[token >> 5]) >> (token & 31) & 1):
            return False
        return not (row.ban and token in row.edits.banned)

    @property
    def level_room(self) -> int:
        """Nodes to add in this level. Without calibrated chances, deeper levels get their share of the budget."""
        tree, task = self.tree, self.task
        if task.level_floor > -math.inf:
            return MAX_NODES
        levels_left = task.max_depth - tree.depths[self.anchors[self.frontier[0]]]
        share = (task.max_nodes - len(tree) + 1) // max(1, min(levels_left, task.max_nodes))
        return max(1, share, len(self.frontier))

    def advance(self, fresh: Seq[int]) -> None:
        """Make the best of the ``fresh`` nodes that may be expanded the frontier."""
        tree, task = self.tree, self.task
        deep = [n for n in fresh if tree.depths[self.anchors[n]] < task.max_depth]
        worth = [n for n in deep if tree.scores[self.anchors[n]] >= task.level_floor]
        worth.sort(key=lambda n: -tree.scores[self.anchors[n]])
        self.frontier = worth[:WIDEST_LEVEL] if len(tree) - 1 < task.max_nodes else []


def sampling_row(sequence: Sequence, path: Seq[int]) -> RowSampling:
    """Sampling of the token after ``path``, draft tokens that follow the sequence."""
    return sequence.sampling.row(len(sequence.tokens) + len(path), path, sequence.n_output + len(path))


def worth_expanding(growths: Seq[Growth]) -> list[Growth]:
    """The growths with a frontier for which one more level pays, given how many share its price."""
    ready = [growth for growth in growths if growth.frontier]
    priced = [growth for growth in ready if growth.task.expansion is not None]
    if not priced:
        return ready
    priced.sort(key=_reached, reverse=True)
    expansion = priced[0].task.expansion
    assert expansion is not None
    depth = priced[0].tree.depths[priced[0].anchors[priced[0].frontier[0]]]
    reached = [math.exp(_reached(growth)) for growth in priced]
    kept = trees_to_expand(expansion, reached, depth, len(ready) - len(priced))
    stopped = {id(growth) for growth in priced[kept:]}
    return [growth for growth in ready if id(growth) not in stopped]


def _reached(growth: Growth) -> float:
    """Log of the chance that the best node of the frontier is reached."""
    return max(growth.tree.scores[growth.anchors[node]] for node in growth.frontier)


def feed(decoder: TargetDecoder, growths: Seq[Growth]) -> tuple[list[Growth], Tensor | None]:
    """Compute the frontier of every growth; returns the growths that fit, and logits of their frontiers in order, those
    of a growth followed by its rows ahead.

    A growth fits if the forward and its own pages have room for its rows. Several own nodes may stand for one node of
    the tree, so there may be more of them than planned.

    The chain in the KV cache is not computed again, so a tree that is a chain costs one row per level. If the frontier
    branches off higher up, the part below the last common node is computed again.
    """
    entries: list[BatchEntry] = []
    rows: list[int] = []
    fed: list[Growth] = []
    total = 0
    for growth in growths:
        entry, wanted, chain = _entry(growth)
        room = min(decoder.max_rows - total, len(entry.pages) * PAGE_SIZE - entry.ctx)
        if len(entry.tokens) > room or len(rows) + len(wanted) > decoder.max_logit_rows:
            growth.frontier = []
            continue
        growth.chain = chain
        rows += [total + row for row in wanted]
        total += len(entry.tokens)
        entries.append(entry)
        fed.append(growth)
    if not entries:
        return [], None
    return fed, decoder.forward(ForwardBatch.build(entries), rows)


def _entry(growth: Growth) -> tuple[BatchEntry, list[int], list[int]]:
    """(rows to compute, which of them are the frontier and those ahead, chain in the KV cache afterwards)."""
    chain, paths = growth.chain, [growth.path(node) for node in growth.frontier]
    shared = min(common_length(chain, path) for path in paths)
    if len(paths) > 1:
        shared -= 1  # rows of one entry have one root, so the last shared node is computed again
    below = [path[shared:] for path in paths]
    # The best path first: it becomes the chain. What is guessed to follow it may continue the chain.
    best, ahead = below[0], growth.ahead
    others = [node for node in dict.fromkeys(node for path in below for node in path) if node not in best]
    row = {node: i for i, node in enumerate(best)}
    row |= {node: i for i, node in enumerate(others, len(best) + len(ahead))}
    after = range(len(best), len(best) + len(ahead))
    parents = [-1, *(row[growth.parents[node]] for node in best[1:]), *(i - 1 for i in after)]
    parents += [row.get(growth.parents[node], -1) for node in others]
    tokens = [*(growth.tokens[node] for node in best), *ahead, *(growth.tokens[node] for node in others)]
    entry = BatchEntry(tokens, parents, growth.base + shared, growth.pages)
    return entry, [*(row[node] for node in growth.frontier), *after], chain[:shared] + best


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

    def rewind(self, sequence: Sequence) -> None:
        self._drafted.pop(sequence, None)

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
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // 64))))
        self._decoder.forward(ForwardBatch.build([entry]), list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        texts = [self._begin(task) for task in tasks]
        growing, pending, prefilling = [], [], []
        for task, tree, text in zip(tasks, trees, texts, strict=True):
            # The draft's embedding may lack a token: the target's may be larger, by padding.
            if text is None or max(text.ids[text.start :]) >= self._decoder.config.vocab_size:
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
        """Add a level's children, best first, within `Growth.level_room`; returns the new own nodes."""
        task, tree = growth.task, growth.tree
        offered = [
            (rank, tree.scores[growth.anchors[node]] + logprob, node, token, logprob)
            for node, options in zip(growth.frontier, children, strict=True)
            for rank, (token, logprob) in enumerate(options[: task.width])
        ]
        offered.sort(key=lambda o: (o[0], -o[1]))
        for node, options in zip(growth.frontier, children, strict=True):
            if options:
                self._table.add(task.sequence.salt, *_bigram(growth, node), options[0][0])
        fresh = []
        for rank, _, node, token, logprob in offered[: growth.level_room]:
            anchor = task.add(tree, growth.anchors[node], token, math.exp(logprob), rank)
            if anchor >= 0:
                fresh.append(growth.add(node, token, anchor))
        return fresh


def _bigram(growth: Growth, node: int) -> tuple[int, int]:
    """The token before ``node`` and its own. A text of one token is its own predecessor."""
    before = growth.tokens[growth.parents[node]] if node else growth.task.sequence.tokens[-2:][0]
    return before, growth.tokens[node]
