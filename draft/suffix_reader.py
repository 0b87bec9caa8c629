"""One sequence in the eyes of the suffix drafter: its own text, and where it stands in the texts of others."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.continuation import MAX_CONTEXTS, Context
from draft.suffix_automaton import BREAK, SuffixAutomaton
from draft.suffix_cursor import SuffixCursor
from draft.text_store import TextStore
from specdec.sequence import Sequence


class SuffixReader:
    """Indexes a sequence's prediction, prompt and output, and follows it through the texts of ``stores``."""

    __slots__ = ("automaton", "cursors", "indexed", "lead", "stores")

    def __init__(self, sequence: Sequence, stores: list[TextStore]) -> None:
        prediction = sequence.request.prediction_ids
        self.automaton = SuffixAutomaton()
        self.lead = (*prediction, BREAK) if prediction else ()  # indexed before the prompt
        self.indexed = -len(self.lead)  # tokens of the sequence; below zero, of the lead
        self.stores = stores
        self.cursors: list[SuffixCursor] = []

    def catch_up(self, tokens: Seq[int], budget: int) -> int:
        """Index at most ``budget`` tokens; returns how many it was."""
        start = self.indexed
        if start < 0:
            upto = min(start + budget, 0)
            self.automaton.extend(self.lead[start : upto or None])
        else:
            upto = min(start + budget, len(tokens))
            self.automaton.extend(tokens[start:upto])
        self.indexed = upto
        return upto - start

    def contexts(self, tokens: Seq[int]) -> list[Context]:
        """The longest contexts of the sequence's end that something followed, over all texts."""
        found: list[Context] = []
        if self.indexed == len(tokens):
            state = self.automaton.links[self.automaton.last]
            if state > 0:
                found.append((self.automaton, state, self.automaton.lengths[state]))
        found += [(cursor.automaton, cursor.state, cursor.length) for cursor in self._follow(tokens) if cursor.state]
        found.sort(key=_by_length)
        return found[:MAX_CONTEXTS]

    def _follow(self, tokens: Seq[int]) -> list[SuffixCursor]:
        texts = [text for store in self.stores for text in store.generations if text.size]
        if [cursor.automaton for cursor in self.cursors] != texts:
            known = {id(cursor.automaton): cursor for cursor in self.cursors}
            self.cursors = [known.get(id(text)) or SuffixCursor(text) for text in texts]
        for cursor in self.cursors:
            cursor.follow(tokens)
        return self.cursors


def _by_length(context: Context) -> int:
    return -context[2]
