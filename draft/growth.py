"""A tree that a small model grows level by level, and what of it lies in the model's KV cache."""

from __future__ import annotations

import math
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from draft.protocol import DraftTask
from specdec.models.target_decoder import TargetDecoder
from specdec.tree import MAX_NODES, TokenTree
from verify_kernels.forward_batch import PAGE_SIZE, BatchEntry, ForwardBatch
from verify_kernels.row_sampling import RowSampling

WIDEST_LEVEL = 4  # nodes expanded per level: more of them are too unlikely to be reached


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
        return self.task.sampling.row(len(seq.tokens) + len(path), path, seq.n_output + len(path))

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
    asked = [growth for growth in ready if growth.task.pace is not None]
    if not asked:
        return ready
    asked.sort(key=_reached, reverse=True)
    pace = asked[0].task.pace
    assert pace is not None
    kept = pace.keep([math.exp(_reached(growth)) for growth in asked], len(ready) - len(asked))
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
        entry, wanted = _entry(growth)
        room = min(decoder.max_rows - total, len(entry.pages) * PAGE_SIZE - entry.ctx)
        if len(entry.tokens) > room or len(rows) + len(wanted) > decoder.max_logit_rows:
            growth.frontier = []
            continue
        rows += [total + row for row in wanted]
        total += len(entry.tokens)
        entries.append(entry)
        fed.append(growth)
    if not entries:
        return [], None
    return fed, decoder.forward(ForwardBatch.build(entries), rows)


def _entry(growth: Growth) -> tuple[BatchEntry, list[int]]:
    """Rows to compute, and which of them are the frontier; updates the chain."""
    chain, paths = growth.chain, [growth.path(node) for node in growth.frontier]
    shared = min(_common(chain, path) for path in paths)
    if len(paths) > 1:
        shared -= 1  # rows of one entry hang off one root: the last shared node is that, computed once more
    below = [path[shared:] for path in paths]
    order = list(dict.fromkeys(node for path in below for node in path))  # the best path first: it extends the chain
    row = {node: i for i, node in enumerate(order)}
    parents = [row.get(growth.parents[node], -1) for node in order]
    parents[0] = -1
    growth.chain = chain[:shared] + below[0]
    entry = BatchEntry([growth.tokens[n] for n in order], parents, growth.base + shared, growth.pages)
    return entry, [row[node] for node in growth.frontier]


def _common(chain: Seq[int], path: Seq[int]) -> int:
    n = 0
    for one, other in zip(chain, path, strict=False):
        if one != other:
            break
        n += 1
    return n
