"""Grows trees level by level, with the forwards that this takes of a draft model."""

from __future__ import annotations

import math
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TypeVar

from torch import Tensor

from draft.protocol import DraftTask
from specdec.control.policies.how_deep import trees_to_expand
from specdec.core.kv_cache import common_length
from specdec.core.tree import MAX_NODES, TokenTree
from specdec.models.decoder import TargetDecoder
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.sampling import RowSampling

MASKED_LOGIT = -1e31  # samplers treat logits up to -1e30 as masked
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
        sequence, n = self.task.sequence, len(path)
        return sequence.sampling.row(len(sequence.tokens) + n, path, sequence.n_output + n)

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


def add_children(growth: Growth, children: Seq[Seq[tuple[int, float]]]) -> list[int]:
    """Add the best children of the frontier, within `Growth.level_room`; returns the new own nodes.

    children: per frontier node (token, log-probability), best first.
    """
    task, tree = growth.task, growth.tree
    offered = [
        (rank, tree.scores[growth.anchors[node]] + logprob, node, token, logprob)
        for node, options in zip(growth.frontier, children, strict=True)
        for rank, (token, logprob) in enumerate(options[: task.width])
    ]
    # By rank first: the first child holds the target's choice most often, whatever its probability.
    offered.sort(key=lambda o: (o[0], -o[1]))
    fresh = []
    for rank, _, node, token, logprob in offered[: growth.level_room]:
        anchor = task.add(tree, growth.anchors[node], token, math.exp(logprob), rank)
        if anchor >= 0:
            fresh.append(growth.add(node, token, anchor))
    return fresh


Grown = TypeVar("Grown", bound=Growth)


def worth_expanding(growths: Seq[Grown]) -> list[Grown]:
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


def feed(decoder: TargetDecoder, growths: Seq[Grown]) -> tuple[list[Grown], Tensor | None]:
    """Compute the frontier of every growth; returns the growths that fit, and logits of their frontiers in order, those
    of a growth followed by its rows ahead.

    A growth fits if the forward and its own pages have room for its rows. Several own nodes may stand for one node of
    the tree, so there may be more of them than planned.

    The chain in the KV cache is not computed again, so a tree that is a chain costs one row per level. If the frontier
    branches off higher up, the part below the last common node is computed again.
    """
    entries: list[BatchEntry] = []
    rows: list[int] = []
    fed: list[Grown] = []
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
class PendingPrefill:
    """A text that the draft model has not computed completely."""

    ids: Seq[int]  # all tokens, in the draft's vocabulary
    start: int  # the first token to compute; at most the last one
    pages: Seq[int]  # of its KV
    reached: Callable[[int], None]  # receives the number of leading tokens that have KV
    end: int | None = None  # where to stop in this step; None: after the last token, whose logits are needed
    ahead: Seq[int] = ()  # masks or guesses after the last token, whose logits are needed too; not counted as reached


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
