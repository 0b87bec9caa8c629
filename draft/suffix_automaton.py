"""A suffix automaton that grows token by token and counts its contexts, and cursors that match sequences in it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Seq
from itertools import chain, islice

COUNTED_SUFFIXES = 32  # suffixes whose counts each token raises; bounds the cost on repetitive text
BREAK = -1  # token between two texts: no sequence holds it, so no match crosses it
MAX_FOLLOWERS = 64  # followers read of a context; a context with more predicts badly
_NONE = -2  # token of a state without followers


class SuffixAutomaton:
    """Online suffix automaton (Blumer et al. 1985): O(1) amortised per token.

    State s stands for contexts of up to ``lengths[s]`` tokens, all longer than ``lengths[links[s]]``. ``counts[s]`` is
    their number of occurrences, exact for the `COUNTED_SUFFIXES` longest contexts at each token and a lower bound for
    shorter ones. State 0 is the empty context. Most states have one follower, which flat arrays hold; a dict holds the
    further ones of the few states that branch. So a token takes about 150 bytes instead of 500.
    """

    __slots__ = ("_branches", "_first_state", "_first_token", "counts", "last", "lengths", "links", "size")

    def __init__(self, tokens: Iterable[int] = ()) -> None:
        self._first_token, self._first_state = array("i", (_NONE,)), array("i", (0,))
        self._branches: dict[int, dict[int, int]] = {}
        self.links, self.lengths, self.counts = array("i", (-1,)), array("i", (0,)), array("i", (0,))
        self.last = 0
        self.size = 0
        self.extend(tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            self.append(token)

    def append(self, token: int) -> None:
        """Append one token to the text."""
        first_token, first_state, branches = self._first_token, self._first_state, self._branches
        links, lengths = self.links, self.lengths
        self.size += 1
        new = self._state(lengths[self.last] + 1, _NONE, 0)
        state, target = self.last, -1
        while state != -1:
            first = first_token[state]
            if first == token:
                target = first_state[state]
                break
            if first == _NONE:
                first_token[state], first_state[state] = token, new
            else:
                more = branches.get(state)
                if more is None:
                    branches[state] = {token: new}
                elif token in more:
                    target = more[token]
                    break
                else:
                    more[token] = new
            state = links[state]
        if target == -1:
            links[new] = 0
        else:
            links[new] = target if lengths[target] == lengths[state] + 1 else self._split(state, token, target)
        self.last = new
        self._count(new)

    def _split(self, state: int, token: int, target: int) -> int:
        """A new state for the contexts of ``target`` that are a context of ``state`` followed by ``token``."""
        clone = self._state(self.lengths[state] + 1, self._first_token[target], self._first_state[target])
        if target in self._branches:
            self._branches[clone] = dict(self._branches[target])
        self.links[clone] = self.links[target]
        self.counts[clone] = self.counts[target]
        self.links[target] = clone
        while state != -1 and self.follow(state, token) == target:
            if self._first_token[state] == token:
                self._first_state[state] = clone
            else:
                self._branches[state][token] = clone
            state = self.links[state]
        return clone

    def _count(self, state: int) -> None:
        counts, links = self.counts, self.links
        for _ in range(COUNTED_SUFFIXES):
            if state <= 0:
                return
            counts[state] += 1
            state = links[state]

    def _state(self, length: int, token: int, follower: int) -> int:
        self._first_token.append(token)
        self._first_state.append(follower)
        self.links.append(-1)
        self.lengths.append(length)
        self.counts.append(0)
        return len(self.links) - 1

    def follow(self, state: int, token: int) -> int:
        """The state after ``token`` in the contexts of ``state``; -1 if it never followed them."""
        if self._first_token[state] == token:
            return self._first_state[state]
        more = self._branches.get(state)
        return -1 if more is None else more.get(token, -1)

    def followers(self, state: int) -> Iterator[tuple[int, int]]:
        """(token, state after it) of what followed ``state``, in order of first occurrence, at most `MAX_FOLLOWERS`."""
        first = self._first_token[state]
        if first == _NONE:
            return iter(())
        own = ((first, self._first_state[state]),)
        more = self._branches.get(state)
        return iter(own) if more is None else islice(chain(own, more.items()), MAX_FOLLOWERS)

    def sole_follower(self, state: int) -> tuple[int, int]:
        """The token that always followed ``state`` and the state after it; token -2 if there is none, or several."""
        if state in self._branches:
            return _NONE, 0
        return self._first_token[state], self._first_state[state]


WINDOW = 32  # tokens from which a match is rebuilt; a longer match predicts no better


class SuffixCursor:
    """The longest suffix of a sequence in an automaton's text, O(1) amortised per token.

    The method is matching statistics (Chang and Lawler 1994). ``state`` is the automaton's state of that suffix,
    ``length`` its tokens. The automaton may grow between calls. Growth splits states, but only moves shorter contexts
    up the chain of links, so `_climb` corrects the state. New text may also hold a longer match, so after growth the
    last `WINDOW` tokens are matched again. Hence ``length`` is exact below `WINDOW` and at least `WINDOW` otherwise.
    """

    __slots__ = ("_position", "_size", "automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = self.length = 0
        self._position = self._size = 0

    def follow(self, tokens: Seq[int]) -> None:
        """Process the new ones of ``tokens``, all of the sequence's; the earlier ones have not changed."""
        automaton, count = self.automaton, len(tokens)
        if automaton.size != self._size or count - self._position > WINDOW:
            self._rematch(tokens)
        else:
            for position in range(self._position, count):
                self.step(tokens[position])
        self._position, self._size = count, automaton.size

    def _rematch(self, tokens: Seq[int]) -> None:
        if self.length and len(tokens) - self._position <= WINDOW:
            for position in range(self._position, len(tokens)):
                self.step(tokens[position])
            if self.length >= WINDOW:
                self._climb()
                return
        self.state = self.length = 0
        for token in tokens[-WINDOW:]:
            self.step(token)

    def step(self, token: int) -> None:
        """Append ``token`` to the sequence."""
        self._climb()
        automaton, state = self.automaton, self.state
        target = automaton.follow(state, token)
        while target < 0 and state:
            state = automaton.links[state]
            self.length = automaton.lengths[state]
            target = automaton.follow(state, token)
        if target < 0:
            self.state = self.length = 0
        else:
            self.state = target
            self.length += 1

    def _climb(self) -> None:
        automaton = self.automaton
        while self.state and self.length <= automaton.lengths[automaton.links[self.state]]:
            self.state = automaton.links[self.state]
