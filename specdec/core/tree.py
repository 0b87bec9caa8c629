"""The token tree of one sequence: drafters propose it, one forward verifies it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from specdec.core.fields import MAX_DRAFT_NODES

MAX_NODES = MAX_DRAFT_NODES + 1  # of a tree that one drafter proposes or a forward verifies, the root included


class TokenTree:
    """Nodes in topological order, as parallel lists. Node 0 is the pending token: committed, its KV not yet computed.

    Children of a node hold distinct tokens, so proposals merge into one trie. A tree of one node is plain decode.
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

    def follow(self, tokens: Sequence[int], among: Collection[int]) -> list[int]:
        """Nodes along ``tokens`` from the root, as far as they exist and are in ``among``."""
        nodes: list[int] = []
        node = 0
        for token in tokens:
            child = self._children.get((node, token))
            if child is None or child not in among:
                break
            nodes.append(child)
            node = child
        return nodes

    def capped_scores(self) -> list[float]:
        """Scores in which no node exceeds its parent."""
        capped, parents = list(self.scores), self.parents
        for node in range(1, len(capped)):
            above = capped[parents[node]]
            if capped[node] > above:
                capped[node] = above
        return capped

    def subtree(self, kept: Iterable[int]) -> TokenTree:
        """The tree of the nodes ``kept``, given best first and with every node's parent among them (or the root).

        Its nodes are in depth-first order, best child first: so the likely path lies at slots that are its positions,
        and its KV needs no move when accepted. A node's score is capped by its parent's.
        """
        capped = self.capped_scores()
        children: dict[int, list[int]] = {}
        for node in kept:
            children.setdefault(self.parents[node], []).append(node)
        out = TokenTree(self.tokens[0])
        stack = [(node, 0) for node in reversed(children.get(0, []))]
        while stack:
            node, parent = stack.pop()
            new = out.add(parent, self.tokens[node], capped[node], self.sources[node], self.cells[node])
            stack.extend((child, new) for child in reversed(children.get(node, [])))
        return out


def check_tree(tokens: Sequence[int], parents: Sequence[int], vocab_size: int) -> None:
    """Check a drafter's tree.

    Raises:
        ValueError: lengths differ, a parent does not precede its child, or a token is no id of the vocabulary.
    """
    if len(tokens) != len(parents):
        raise ValueError(f"tree: {len(tokens)} tokens but {len(parents)} parents")
    for node, (token, parent) in enumerate(zip(tokens, parents, strict=True)):
        if not -1 <= parent < node or (parent == -1) != (node == 0):
            raise ValueError(f"parents: node {node} names parent {parent}")
        if not 0 <= token < vocab_size:
            raise ValueError(f"tokens: node {node} holds {token}, the vocabulary ends at {vocab_size}")
