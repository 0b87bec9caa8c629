"""Drafts from text: what followed the longest suffix of the sequence that was seen before."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Seq

from draft.continuation import expand
from draft.protocol import DraftTask
from draft.reading_order import ReadingOrder
from draft.suffix_reader import SuffixReader
from draft.text_library import TextLibrary
from specdec.config import SpeculationConfig
from specdec.sequence import Sequence
from specdec.tree import TokenTree

CATCH_UP = 2048  # tokens indexed per step, of all sequences together: a long prompt must not hold up the others


class SuffixDrafter:
    """Continues the longest suffixes of the sequence that were seen before, by counts, best first.

    Looks in the request's own prompt, output and prediction, in its session's earlier texts, and in the finished
    texts of requests with the same salt. ``order`` takes fill-in-the-middle prompts apart: what is written next follows
    the text before the cursor, and a finished text is remembered as the document it makes.
    """

    name = "suffix"
    costly = False

    def __init__(
        self,
        config: SpeculationConfig,
        order: ReadingOrder | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._order = order
        self._library = TextLibrary(config, clock)
        self._readers: dict[int, SuffixReader] = {}

    def begin(self, sequence: Sequence) -> None:
        """Start an index; it is filled while the prompt is prefilled."""
        self._readers[id(sequence)] = SuffixReader(sequence, self._library.stores(sequence.request), self._order)

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Index what is new and continue each sequence."""
        budget = CATCH_UP
        trees = []
        for task in tasks:
            tokens = task.sequence.tokens
            reader = self._readers[id(task.sequence)]
            reader.hear(tokens)
            while budget and reader.behind:
                budget -= reader.catch_up(budget)
            tree = TokenTree(tokens[-1])
            if task.max_nodes > 0 and task.max_depth > 0:
                contexts = reader.contexts()
                if contexts:
                    expand(task, tree, contexts)
            trees.append(tree)
        self._library.work(max(budget, CATCH_UP // 8))
        return trees

    def observe(self, sequence: Sequence, tokens: Seq[int]) -> None:
        """Nothing to do: `propose` reads the committed tokens."""

    def rewind(self, sequence: Sequence) -> None:
        """Nothing to do: the index holds tokens, not KV."""

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence, but keep its text for later ones."""
        reader = self._readers.pop(id(sequence), None)
        if reader is not None:
            reader.hear(sequence.tokens)
            self._library.add(sequence.request, reader.document)
