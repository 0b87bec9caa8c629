"""A suffix automaton that grows one token at a time and counts how often each context was seen."""

from __future__ import annotations

COUNT_WALK = 32  # suffixes of one token whose counts are raised; bounds the cost on repetitive text


class SuffixAutomaton:
    """Online suffix automaton (Blumer et al. 1985): O(1) amortised per token.

    State s stands for contexts of up to ``lengths[s]`` tokens; ``edges[s]`` leads to what followed them;
    ``counts[s]`` tells how often they were seen, exact for the ``COUNT_WALK`` longest contexts at each token
    and a lower bound for shorter ones.
    """

    __slots__ = ("counts", "edges", "last", "lengths", "links")

    def __init__(self) -> None:
        self.edges: list[dict[int, int]] = [{}]
        self.links = [-1]
        self.lengths = [0]
        self.counts = [0]
        self.last = 0

    def extend(self, token: int) -> None:
        """Append one token to the text."""
        edges, links, lengths = self.edges, self.links, self.lengths
        new = self._state(lengths[self.last] + 1, {})
        state = self.last
        while state != -1 and token not in edges[state]:
            edges[state][token] = new
            state = links[state]
        if state == -1:
            links[new] = 0
        else:
            target = edges[state][token]
            links[new] = target if lengths[target] == lengths[state] + 1 else self._split(state, token, target)
        self.last = new
        self._count(new)

    def _split(self, state: int, token: int, target: int) -> int:
        clone = self._state(self.lengths[state] + 1, dict(self.edges[target]))
        self.links[clone] = self.links[target]
        self.counts[clone] = self.counts[target]
        self.links[target] = clone
        while state != -1 and self.edges[state].get(token) == target:
            self.edges[state][token] = clone
            state = self.links[state]
        return clone

    def _count(self, state: int) -> None:
        for _ in range(COUNT_WALK):
            if state <= 0:
                return
            self.counts[state] += 1
            state = self.links[state]

    def _state(self, length: int, edges: dict[int, int]) -> int:
        self.edges.append(edges)
        self.links.append(-1)
        self.lengths.append(length)
        self.counts.append(0)
        return len(self.edges) - 1

    def match(self, min_length: int) -> int:
        """The state of the longest suffix of the text that was followed by something before; 0 if it is shorter
        than ``min_length``."""
        state = self.links[self.last]
        while state > 0 and not self.edges[state]:
            state = self.links[state]
        return state if state > 0 and self.lengths[state] >= min_length else 0
