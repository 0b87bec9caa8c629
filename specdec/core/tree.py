"""The token tree of one sequence: drafters propose it, one forward verifies it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from specdec.core.fields import MAX_DRAFT_NODES

MAX_NODES = MAX_DRAFT_NODES + 1  # of a tree that one drafter proposes or a forward verifies, the root included
MIN_SCORE = -1e6  # log-chance of a node; lower ones are malformed


class TokenTree:
    """Nodes in topological order, as parallel lists. Node 0 is the pending token: committed, its KV not yet computed.

    Children of a node hold distinct tokens, so proposals merge into one trie. A drafter never scores a node above
    its parent (`check_tree`). A tree of one node is plain decode.
    """

    __slots__ = ("_children", "cells", "depths", "parents", "scores", "sources", "tokens")

    def __init__(self, pending: int) -> None:
        self.tokens = [pending]
        self.parents = [-1]
        self.depths = [0]
        self.scores = [0.0]  # log of the estimated chance that the node is reached
        self.sources: list[tuple[str, ...]] = [()]  # names of the drafters that proposed the node
        self.cells = [-1]  # calibration cell, -1: none
        self._children: dict[tuple[int, int], int] = {}

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, score: float, source: str | tuple[str, ...], cell: int = -1) -> int:
        """Add ``token`` under ``parent``; returns its node. Added again, it keeps the best score with its cell.

        Raises:
            ValueError: ``parent`` is not a node.
        """
        known = self._children.get((parent, token))
        named = (source,) if isinstance(source, str) else source
        if known is not None:
            if score > self.scores[known]:
                self.scores[known], self.cells[known] = score, cell
            if named != self.sources[known]:
                self.sources[known] = tuple(dict.fromkeys(self.sources[known] + named))
            return known
        if not 0 <= parent < len(self.tokens):
            raise ValueError(f"parent: {parent} is not a node of a tree of {len(self.tokens)}")
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.scores.append(score)
        self.sources.append(named)
        self.cells.append(cell)
        self._children[parent, token] = node
        return node

    def child(self, node: int, token: int) -> int | None:
        """The child of ``node`` that holds ``token``, or None."""
        return self._children.get((node, token))

    def path(self, node: int) -> list[int]:
        """Nodes from the root's child down to ``node``; empty for the root."""
        nodes = []
        while node > 0:
            nodes.append(node)
            node = self.parents[node]
        return nodes[::-1]

    def path_tokens(self, node: int) -> list[int]:
        """Tokens from the root's child down to ``node``."""
        return [self.tokens[n] for n in self.path(node)]

    def follow(self, tokens: Sequence[int]) -> list[int]:
        """Nodes along ``tokens`` from the root. Raises KeyError if one has no node."""
        nodes, node = [], 0
        for token in tokens:
            node = self._children[node, token]
            nodes.append(node)
        return nodes

    def subtree(self, kept: Iterable[int]) -> TokenTree:
        """The tree of the nodes ``kept``, given best first and with every node's parent among them (or the root).

        Its nodes are in depth-first order, best child first: so the likely path lies at slots that are its positions,
        and its KV needs no move when accepted.
        """
        children: dict[int, list[int]] = {}
        for node in kept:
            children.setdefault(self.parents[node], []).append(node)
        out = TokenTree(self.tokens[0])
        stack = [(node, 0) for node in reversed(children.get(0, []))]
        while stack:
            node, parent = stack.pop()
            new = out.add(parent, self.tokens[node], self.scores[node], self.sources[node], self.cells[node])
            stack.extend((child, new) for child in reversed(children.get(node, [])))
        return out


def check_tree(tree: TokenTree, vocab_size: int, cells: int) -> None:
    """Check a drafter's tree. cells: number of calibration cells that nodes may name.

    Raises:
        ValueError: lists differ in length, a parent does not precede its child, or a token, score, cell or source is
            out of range.
    """
    n = len(tree)
    if any(len(each) != n for each in (tree.parents, tree.depths, tree.scores, tree.sources, tree.cells)):
        raise ValueError("parents, depths, scores, sources and cells: must be one per node")
    if (tree.parents[0], tree.depths[0], tree.scores[0]) != (-1, 0, 0.0):
        raise ValueError("the root: must have no parent, depth 0 and score 0")
    for node in range(1, n):
        token, parent, score, cell = tree.tokens[node], tree.parents[node], tree.scores[node], tree.cells[node]
        if not 0 <= parent < node:
            raise ValueError(f"parents: node {node} names parent {parent}")
        if type(token) is not int or not 0 <= token < vocab_size:
            raise ValueError(f"tokens: node {node} holds {token!r}, must be an int below {vocab_size}")
        if tree.depths[node] != tree.depths[parent] + 1:
            raise ValueError(f"depths: node {node} has {tree.depths[node]}")
        if not MIN_SCORE < score <= tree.scores[parent]:
            raise ValueError(f"scores: node {node} has {score}, must be finite and at most its parent's")
        if type(cell) is not int or not -1 <= cell < cells:
            raise ValueError(f"cells: node {node} names {cell!r} of {cells}")
        if not all(type(source) is str for source in tree.sources[node]):
            raise ValueError(f"sources: node {node} names {tree.sources[node]!r}")
