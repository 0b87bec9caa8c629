"""One sequence in the eyes of the suffix drafter: its own text, and where it stands in the texts of others."""

from __future__ import annotations

from collections.abc import Sequence as Seq

from draft.continuation import MAX_CONTEXTS, Context
from draft.reading_order import Parts, ReadingOrder
from draft.suffix_automaton import BREAK, SuffixAutomaton
from draft.suffix_cursor import SuffixCursor
from draft.text_store import TextStore
from specdec.sequence import Sequence


class SuffixReader:
    """Indexes a sequence's prediction, prompt and output, and follows it through the texts of ``stores``."""

    __slots__ = ("_after", "_heard", "_indexed", "_lead", "_text", "automaton", "cursors", "stores")

    def __init__(self, sequence: Sequence, stores: list[TextStore], order: ReadingOrder | None = None) -> None:
        prompt = sequence.tokens
        parts = order.parts(prompt) if order else Parts([], list(prompt), [], [])
        self._text = parts.head + parts.prefix + parts.middle  # up to the cursor, and what is written there
        self._after = parts.suffix
        self._heard = len(prompt)
        self.automaton = SuffixAutomaton()
        # Indexed before the text, so that the text's end stays the automaton's.
        self._lead = [
            token for part in (sequence.request.prediction_ids, self._after) if part for token in (*part, BREAK)
        ]
        self._indexed = -len(self._lead)  # tokens of the text; below zero, of the lead
        self.stores = stores
        self.cursors: list[SuffixCursor] = []

    @property
    def behind(self) -> int:
        """Tokens not indexed yet."""
        return len(self._text) - self._indexed

    @property
    def document(self) -> list[int]:
        """The whole text in the order in which it is read."""
        return self._text + self._after

    def hear(self, tokens: Seq[int]) -> None:
        """``tokens`` are all of the sequence's."""
        if len(tokens) > self._heard:
            self._text += tokens[self._heard :]
            self._heard = len(tokens)

    def catch_up(self, budget: int) -> int:
        """Index at most ``budget`` tokens; returns how many it was."""
        start = self._indexed
        if start < 0:
            upto = min(start + budget, 0)
            self.automaton.extend(self._lead[start : upto or None])
        else:
            upto = min(start + budget, len(self._text))
            self.automaton.extend(self._text[start:upto])
        self._indexed = upto
        return upto - start

    def contexts(self) -> list[Context]:
        """The longest contexts of the text's end that something followed, over all texts."""
        found: list[Context] = []
        if not self.behind:
            state = self.automaton.links[self.automaton.last]
            if state > 0:
                found.append((self.automaton, state, self.automaton.lengths[state]))
        found += [(cursor.automaton, cursor.state, cursor.length) for cursor in self._follow() if cursor.state]
        found.sort(key=_by_length)
        return found[:MAX_CONTEXTS]

    def _follow(self) -> list[SuffixCursor]:
        texts = [text for store in self.stores for text in store.generations if text.size]
        if [cursor.automaton for cursor in self.cursors] != texts:
            known = {id(cursor.automaton): cursor for cursor in self.cursors}
            self.cursors = [known.get(id(text)) or SuffixCursor(text) for text in texts]
        for cursor in self.cursors:
            cursor.follow(self._text)
        return self.cursors


def _by_length(context: Context) -> int:
    return -context[2]
