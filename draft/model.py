"""Drafts with a small model of the target's vocabulary: level by level, by the target's own noise."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from draft.protocol import DraftTask, ModelBasedDrafter
from specdec.control.policies.how_deep import trees_to_expand
from specdec.core.sampling import Sampler
from specdec.core.sequence import Sequence
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.models.decoder import TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling


@dataclass(slots=True)
class PendingPrefill:
    """ids: all tokens of a text, in the draft's vocabulary. start: the first to be fed, the last one at most. pages:
    where its KV goes. reached: told how many have theirs for good. end: how far to read for now; None: to the last
    token, whose logits are wanted."""

    ids: Seq[int]
    start: int
    pages: Seq[int]
    reached: Callable[[int], None]
    end: int | None = None


def prefill_drafts(decoder: TargetDecoder, pending: Seq[PendingPrefill]) -> Tensor | None:
    """Feed all of ``pending`` in as many forwards as they take; logits of the last token of each that is read to it,
    float32 [texts, vocab], or None where there are none.

    Short ones go on with the long: their last rows are fed once more.
    """
    whole, logits = [text for text in pending if text.end is None], None
    while True:
        parts = [text for text in pending if text.end is not None and text.start < text.end]
        if not parts and (logits is not None or not whole):
            return logits
        entries, rows, done, total = [], [], [], 0
        for text in [*whole, *parts]:
            chain = list(text.ids[text.start : text.end][: decoder.max_rows - total])
            if not chain:
                continue
            entries.append(BatchEntry(chain, list(range(-1, len(chain) - 1)), text.start, text.pages))
            total += len(chain)
            if text.start + len(chain) == len(text.ids):
                rows.append(total - 1)
            done.append((text, min(text.start + len(chain), len(text.ids) - 1)))
        found = decoder.forward(ForwardBatch.build(entries), rows)
        logits = found if whole and len(rows) == len(whole) else None
        for text, upto in done:  # only now is it true
            text.start = upto
            text.reached(upto)


DEAD = -1e31  # below what samplers take for a live logit
FAR = 14.0  # below the best by so much, over the temperature, a token hardly ever wins by its noise
SPREAD_ROWS = 16  # of logits that are put under all the vocabulary's ids at a time
WIDEST_LEVEL = 4  # nodes expanded per level: more of them are too unlikely to be reached


@dataclass(frozen=True, slots=True)
class Drafted:
    """A chain that was drafted: its tokens' KV lies from slot ``base`` on, the root's first."""

    base: int
    tokens: Seq[int]

    def computed(self, ids: Seq[int], computed: int) -> int:
        """Leading tokens of ``ids``, the text as it goes on, that have KV, at most all but the last. computed: without
        the chain; less than ``base`` where what it hangs off is gone."""
        if computed < self.base:
            return computed
        most = min(len(self.tokens), len(ids) - 1 - self.base)
        agreed = next((i for i in range(most) if ids[self.base + i] != self.tokens[i]), most)
        return max(computed, self.base + agreed)


@dataclass(slots=True)
class Growth:
    """tree: what is proposed. tokens, parents: the drafter's own tree of its own tokens, node 0 the root; anchors: the
    node of ``tree`` each stands for. base: slot of the root, in ``pages``. chain: own nodes whose KV lies at slots
    base, base + 1, ...; each the parent of the next. frontier: nodes to be expanded next, best first.
    """

    task: DraftTask
    tree: TokenTree
    base: int
    pages: Seq[int]
    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    anchors: list[int] = field(default_factory=lambda: [0])
    chain: list[int] = field(default_factory=lambda: [0])
    frontier: list[int] = field(default_factory=lambda: [0])

    def add(self, parent: int, token: int, anchor: int) -> int:
        """A node of the drafter's own tree."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.anchors.append(anchor)
        return len(self.tokens) - 1

    @property
    def drafted(self) -> Drafted:
        """The chain in the cache."""
        return Drafted(self.base, [self.tokens[node] for node in self.chain])

    def path(self, node: int) -> list[int]:
        """Own nodes from the root down to ``node``, both included."""
        nodes = [node]
        while node > 0:
            node = self.parents[node]
            nodes.append(node)
        return nodes[::-1]

    def offer(self, parent: int, token: int, prob: float, rank: int = 0) -> int:
        """As `DraftTask.add`; several of the drafter's nodes may stand for ``parent``, which has ``width`` children."""
        if self.tree.child(parent, token) is None and self.tree.parents.count(parent) >= self.task.width:
            return -1
        return self.task.add(self.tree, parent, token, prob, rank)

    def row(self, path: Seq[int]) -> RowSampling:
        """How the token after ``path``, tokens of ``tree`` from the root's child down, is sampled."""
        seq = self.task.sequence
        return self.task.sequence.sampling.row(len(seq.tokens) + len(path), path, seq.n_output + len(path))

    def permits(self, path: Seq[int], token: int) -> bool:
        """Whether the request lets the target choose ``token`` after ``path``: what is not sampled is not filtered."""
        row = self.row(path)
        if row.edits is None:
            return True
        mask = row.edits.mask if row.mask is None else row.mask
        if mask is not None and (token >= 32 * len(mask) or not int(mask[token >> 5]) >> (token & 31) & 1):
            return False
        return not (row.ban and token in row.edits.banned)

    @property
    def level_room(self) -> int:
        """Nodes to add in this level. Where chances do not tell what pays, the budget is shared with deeper levels."""
        tree, task = self.tree, self.task
        if task.level_floor > -math.inf:
            return MAX_NODES
        levels_left = task.max_depth - tree.depths[self.anchors[self.frontier[0]]]
        share = (task.max_nodes - len(tree) + 1) // max(1, min(levels_left, task.max_nodes))
        return max(1, share, len(self.frontier))

    def advance(self, fresh: Seq[int]) -> None:
        """Make the best of the ``fresh`` nodes the frontier, as far as deeper levels pay."""
        tree, task = self.tree, self.task
        deep = [n for n in fresh if tree.depths[self.anchors[n]] < task.max_depth]
        worth = [n for n in deep if tree.scores[self.anchors[n]] >= task.level_floor]
        worth.sort(key=lambda n: -tree.scores[self.anchors[n]])
        self.frontier = worth[:WIDEST_LEVEL] if len(tree) - 1 < task.max_nodes else []


def going_on(growths: Seq[Growth]) -> list[Growth]:
    """Those with a frontier for which one more level pays, now that some have stopped sharing its price."""
    ready = [growth for growth in growths if growth.frontier]
    asked = [growth for growth in ready if growth.task.expansion is not None]
    if not asked:
        return ready
    asked.sort(key=_reached, reverse=True)
    expansion = asked[0].task.expansion
    assert expansion is not None
    depth = asked[0].tree.depths[asked[0].anchors[asked[0].frontier[0]]]
    kept = trees_to_expand(expansion, [math.exp(_reached(growth)) for growth in asked], depth, len(ready) - len(asked))
    stopped = {id(growth) for growth in asked[kept:]}
    return [growth for growth in ready if id(growth) not in stopped]


def _reached(growth: Growth) -> float:
    """Log of the chance that the best node of the frontier is reached."""
    return max(growth.tree.scores[growth.anchors[node]] for node in growth.frontier)


def feed(decoder: TargetDecoder, growths: Seq[Growth]) -> tuple[list[Growth], Tensor | None]:
    """One level: compute the frontier of every growth; those that fit, and logits of their frontiers in order.

    A growth fits when the forward and its own pages have room for its rows: where several of the drafter's nodes
    stand for one of the tree, there may be more of them than were provided for.

    What lies in the cache as a chain is not computed again, so a tree that is a chain costs one row per level. Where
    the frontier branches off higher up, the part below the last common node of the chain is computed anew.
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
    """Rows to compute, which of them are the frontier, and the chain that is in the cache then."""
    chain, paths = growth.chain, [growth.path(node) for node in growth.frontier]
    shared = min(_common(chain, path) for path in paths)
    if len(paths) > 1:
        shared -= 1  # rows of one entry hang off one root: the last shared node is that, computed once more
    below = [path[shared:] for path in paths]
    order = list(dict.fromkeys(node for path in below for node in path))  # the best path first: it extends the chain
    row = {node: i for i, node in enumerate(order)}
    parents = [row.get(growth.parents[node], -1) for node in order]
    parents[0] = -1
    entry = BatchEntry([growth.tokens[n] for n in order], parents, growth.base + shared, growth.pages)
    return entry, [row[node] for node in growth.frontier], chain[:shared] + below[0]


def _common(chain: Seq[int], path: Seq[int]) -> int:
    n = 0
    for one, other in zip(chain, path, strict=False):
        if one != other:
            break
        n += 1
    return n


class ModelDrafter(ModelBasedDrafter):
    """Proposes the top-w of log q / T + G under the request's own filters, where G is the noise the target will
    use: a without-replacement sample ordered by the chance of holding the target's choice (Daliri et al.,
    arXiv 2408.07978). With T = 0 these are simply the w likeliest tokens.

    Its KV lies in its own pool under the shared page table: slot s of a sequence is slot s in both. Committed
    tokens that it has not seen (a prompt, an accepted run) are fed as a chain before the first level, when it is
    asked for the first time: a request that never needs it never pays for it.

    target_size: rows of the target's output table; ids beyond it, padding of a larger one, are never proposed.
    output_ids: int32, rising: the tokens of the draft's own output table where it holds some of the vocabulary only;
    the others are not proposed either.
    """

    name = "model"

    def __init__(
        self, decoder: TargetDecoder, sampler: Sampler, target_size: int, output_ids: Tensor | None = None
    ) -> None:
        self._decoder, self._sampler, self._target_size = decoder, sampler, target_size
        self._output_ids = None if output_ids is None else output_ids.numpy().astype(np.intp)
        self._spread = torch.full((SPREAD_ROWS, target_size), DEAD) if output_ids is not None else None
        self._drafted: dict[Sequence, Drafted] = {}  # until it is known what came of them

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """What was drafted as it came needs no second forward."""
        drafted = self._drafted.pop(sequence, None)
        if drafted is not None:
            sequence.draft_computed = drafted.computed(sequence.tokens, sequence.draft_computed)

    def rewind(self, sequence: Sequence) -> None:
        """Its KV is gone."""
        self._drafted.pop(sequence, None)

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._drafted.pop(sequence, None)

    def pending_prefill(self, sequence: Sequence) -> int:
        """Committed tokens whose KV it lacks."""
        return len(sequence.tokens) - sequence.draft_computed

    def warm_up(self, rows: int) -> None:
        """One level for ``rows`` sequences: their rows and their logits."""
        entry = BatchEntry([0] * rows, list(range(-1, rows - 1)), 0, list(range(-(-rows // 64))))
        self._decoder.forward(ForwardBatch.build([entry]), list(range(rows)))

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Catch up with the committed tokens, then grow every tree by levels until deeper ones do not pay."""
        trees = [TokenTree(task.sequence.tokens[-1]) for task in tasks]
        growing = [
            Growth(task, tree, len(task.sequence.tokens) - 1, task.sequence.pages, [task.sequence.tokens[-1]])
            for task, tree in zip(tasks, trees, strict=True)
            if task.max_nodes > 0 < task.max_depth and self._knows(task.sequence)
        ]
        begun = growing
        pending = [_pending(growth.task.sequence) for growth in growing]
        reading = [task for task in tasks if task.prefill and self._knows(task.sequence)]
        pending += [_pending(task.sequence, task.prefill) for task in reading]
        logits = prefill_drafts(self._decoder, pending)
        while growing and logits is not None:
            growing = self._expand(growing, logits)
            growing, logits = feed(self._decoder, growing)
        self._drafted |= {growth.task.sequence: growth.drafted for growth in begun}
        return trees

    def _knows(self, sequence: Sequence) -> bool:
        """Whether it has a row for every token still to be fed: a target's table may be larger, by padding."""
        start = min(sequence.draft_computed, len(sequence.tokens) - 1)
        return max(sequence.tokens[start:]) < self._decoder.config.vocab_size

    def _expand(self, growing: Seq[Growth], logits: Tensor) -> list[Growth]:
        """Give frontier nodes their children, best first; returns the growths that can go on."""
        rows = [g.row(g.tree.path_tokens(g.anchors[node])) for g in growing for node in g.frontier]
        children = self._children(logits, rows, max(growth.task.width for growth in growing))
        at = 0
        for growth in growing:
            own = children[at : at + len(growth.frontier)]
            at += len(growth.frontier)
            growth.advance(self._add(growth, own))
        return going_on(growing)

    def _children(self, logits: Tensor, rows: Seq[RowSampling], width: int) -> list[list[tuple[int, float]]]:
        """As `Sampler.children`, of logits of the draft's output table."""
        ids, spread = self._output_ids, self._spread
        if ids is None or spread is None:
            return self._sampler.children(logits[:, : self._target_size], rows, width)
        if all(row.edits is None and row.policy.temperature == 0 for row in rows):  # nothing depends on the ids
            found = self._sampler.children(logits, rows, width)
            return [[(int(ids[token]), logprob) for token, logprob in row] for row in found]
        found, into = [], spread.numpy()
        for at in range(0, len(rows), SPREAD_ROWS):
            some = rows[at : at + SPREAD_ROWS]
            for i, row in enumerate(some):
                values = logits[at + i].numpy()
                if row.edits is None and row.policy.temperature > 0:
                    values = np.where(values >= values.max() - FAR * row.policy.temperature, values, DEAD)
                into[i, ids] = values
            found += self._sampler.children(spread[: len(some)], some, width)
        return found

    def _add(self, growth: Growth, children: Seq[Seq[tuple[int, float]]]) -> list[int]:
        """Add a level's children, the likeliest first, leaving room for deeper levels; returns the new nodes."""
        task, tree = growth.task, growth.tree
        offered = [
            (rank, tree.scores[growth.anchors[node]] + logprob, node, token, logprob)
            for node, options in zip(growth.frontier, children, strict=True)
            for rank, (token, logprob) in enumerate(options[: task.width])
        ]
        offered.sort(key=lambda o: (o[0], -o[1]))
        fresh = []
        for rank, _, node, token, logprob in offered[: growth.level_room]:
            anchor = task.add(tree, growth.anchors[node], token, math.exp(logprob), rank)
            if anchor >= 0:
                fresh.append(growth.add(node, token, anchor))
        return fresh


def _pending(sequence: Sequence, prefill: int | None = None) -> PendingPrefill:
    """All that it has not seen, or the next ``prefill`` tokens but the last."""

    def reached(upto: int) -> None:
        sequence.draft_computed = upto

    tokens = sequence.tokens
    start, end = min(sequence.draft_computed, len(tokens) - 1), None
    if prefill is not None:
        end = min(start + prefill, len(tokens) - 1)
    return PendingPrefill(tokens, start, sequence.pages, reached, end)
