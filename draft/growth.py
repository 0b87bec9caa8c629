"""A tree that a small model grows level by level, and what of it lies in the model's KV cache."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from torch import Tensor

from draft.protocol import DraftTask
from specdec.models.decoder import Decoder
from specdec.tree import TokenTree
from verify_kernels.forward_batch import BatchEntry, ForwardBatch

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

    def advance(self, fresh: Seq[int]) -> None:
        """Make the best of the ``fresh`` nodes the frontier, as far as deeper levels pay."""
        tree, task = self.tree, self.task
        deep = [n for n in fresh if tree.depths[self.anchors[n]] < task.max_depth]
        worth = [n for n in deep if tree.scores[self.anchors[n]] >= task.level_floor]
        worth.sort(key=lambda n: -tree.scores[self.anchors[n]])
        self.frontier = worth[:WIDEST_LEVEL] if len(tree) - 1 < task.max_nodes else []


def feed(decoder: Decoder, growths: Seq[Growth]) -> tuple[list[Growth], Tensor | None]:
    """One level: compute the frontier of every growth; those that fit, and logits of their frontiers in order.

    What lies in the cache as a chain is not computed again, so a tree that is a chain costs one row per level. Where
    the frontier branches off higher up, the part below the last common node of the chain is computed anew.
    """
    entries: list[BatchEntry] = []
    rows: list[int] = []
    fed: list[Growth] = []
    total = 0
    for growth in growths:
        entry, wanted = _entry(growth)
        if total + len(entry.tokens) > decoder.max_rows:
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
