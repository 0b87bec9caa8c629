"""Where a sequence stands in a text that is not its own."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.suffix_automaton import SuffixAutomaton

WINDOW = 32  # tokens looked back on when a match is found anew; a longer match predicts no better


class SuffixCursor:
    """The longest suffix of a sequence that occurs in an automaton's text: matching statistics (Chang and Lawler
    1994), O(1) amortised per token.

    ``state`` is the automaton's state of that suffix, ``length`` its tokens. The automaton may grow between calls.
    Growing splits states, but only ever moves shorter contexts up the chain of links, so climbing it makes the pair
    right again; new text may also hold a longer match, so after growth the last ``WINDOW`` tokens are matched anew.
    Hence ``length`` is exact below ``WINDOW``, and a match at least that long is never taken for a shorter one.
    """

    __slots__ = ("_position", "_size", "automaton", "length", "state")

    def __init__(self, automaton: SuffixAutomaton) -> None:
        self.automaton = automaton
        self.state = self.length = 0
        self._position = self._size = 0

    def follow(self, tokens: Seq[int]) -> None:
        """Catch up with ``tokens``, all of the sequence's; those given before are at their front still."""
        automaton, count = self.automaton, len(tokens)
        if automaton.size != self._size or count - self._position > WINDOW:
            self._renew(tokens)
        else:
            for position in range(self._position, count):
                self.step(tokens[position])
        self._position, self._size = count, automaton.size

    def _renew(self, tokens: Seq[int]) -> None:
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
        """The sequence went on with ``token``."""
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
