"""Drafts from earlier text: what followed the longest suffix of the sequence there."""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Seq

from draft.best_first import MAX_CONTEXTS, Child, expand, match_of, share_out, trust
from draft.protocol import Drafter, DraftTask
from draft.suffix_automaton import BREAK, WINDOW, SuffixAutomaton, SuffixCursor
from draft.text_store import TextLibrary, TextStore
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.models.fim import FimParser, FimParts

Context = tuple[SuffixAutomaton, int, int]
"""(text, state, tokens matched): the longest suffix of the path to a node that the text holds."""


def children(contexts: Seq[Context], width: int) -> list[Child[Context]]:
    """The ``width`` likeliest next tokens."""
    if len(contexts) == 1:  # most nodes of a long chain
        automaton, state, length = contexts[0]
        token, target = automaton.sole_follower(state)
        if token >= 0:
            return [(trust(length, automaton.counts[target]), token, [(automaton, target, length + 1)])]
    return share_out(_followers(contexts), width)


def _followers(contexts: Seq[Context]) -> Iterator[tuple[int, list[tuple[int, int, Context]]]]:
    for automaton, state, length in contexts:
        counts = automaton.counts
        while state > 0:
            options = [(token, target) for token, target in automaton.followers(state) if token >= 0]
            if options:
                behind = length + 1
                yield length, [(token, counts[target], (automaton, target, behind)) for token, target in options]
                break
            state = automaton.links[state]  # the end of a text: shorter contexts may occur elsewhere too
            length = automaton.lengths[state]


# Last tokens of a prompt's cached part, which are indexed though the stores hold them: they predict best
OWN_TOKENS = 512


class SuffixReader:
    """Indexes a sequence's prediction, prompt and output, and matches its end in the texts of ``stores``."""

    __slots__ = ("_after", "_n_read", "_text", "_unindexed", "automaton", "cursors", "stores")

    def __init__(self, sequence: Sequence, stores: list[TextStore], fim: FimParser | None = None) -> None:
        prompt = sequence.tokens
        parts = fim.parts(prompt) if fim else FimParts([], list(prompt), [], [])
        self._text = parts.head + parts.prefix + parts.middle  # up to the cursor, with the output
        self._after = parts.suffix
        self._n_read = len(prompt)
        self.automaton = SuffixAutomaton()
        self._unindexed: list[int] = []
        for part in (sequence.request.prediction_ids, self._after):
            if part:
                self._unindexed += part
                self._unindexed.append(BREAK)
        self.stores = stores
        self.cursors: list[SuffixCursor] = []
        # Last, so that the automaton ends where the text does
        self._unindexed += self._text[self._n_stored(sequence.cached_tokens) :]

    def _n_stored(self, cached: int) -> int:
        """Tokens at the text's beginning that need no index of their own. The prefix cache holds the ``cached`` ones of
        an earlier request of the same salt. Once that ended, the stores hold them too."""
        end = min(cached, len(self._text)) - OWN_TOKENS
        if end > 0:
            for cursor in map(SuffixCursor, self._texts()):
                cursor.follow(self._text[max(0, end - WINDOW) : end])
                if cursor.length == WINDOW:
                    return end
        return 0

    @property
    def pending(self) -> int:
        """Number of tokens that are not indexed yet."""
        return len(self._unindexed)

    @property
    def document(self) -> list[int]:
        """The whole text, in the order of the document."""
        return self._text + self._after

    def read(self, tokens: Seq[int]) -> None:
        """Append the new ones of ``tokens``, all of the sequence's."""
        if len(tokens) > self._n_read:
            new = tokens[self._n_read :]
            self._text += new
            self._unindexed += new
            self._n_read = len(tokens)

    def index(self, budget: int) -> int:
        """Index at most ``budget`` tokens; returns their number."""
        part = self._unindexed[:budget]
        del self._unindexed[:budget]
        self.automaton.extend(part)
        return len(part)

    def contexts(self) -> list[Context]:
        """The longest suffixes of the text that all texts hold, at most `MAX_CONTEXTS`, the longest first."""
        found: list[Context] = []
        if not self.pending:
            state = self.automaton.links[self.automaton.last]
            if state > 0:
                found.append((self.automaton, state, self.automaton.lengths[state]))
        found += [(cursor.automaton, cursor.state, cursor.length) for cursor in self._follow() if cursor.state]
        found.sort(key=lambda context: -context[2])
        return found[:MAX_CONTEXTS]

    def _texts(self) -> list[SuffixAutomaton]:
        return [text for store in self.stores for text in store.generations if text.size]

    def _follow(self) -> list[SuffixCursor]:
        texts = self._texts()
        if [cursor.automaton for cursor in self.cursors] != texts:
            known = {id(cursor.automaton): cursor for cursor in self.cursors}
            self.cursors = [known.get(id(text)) or SuffixCursor(text) for text in texts]
        for cursor in self.cursors:
            cursor.follow(self._text)
        return self.cursors


INDEXED_PER_STEP = 2048  # tokens of all sequences together: a long prompt must not delay the step
WRITTEN_AT_ONCE = 256  # tokens of finished texts: while idle, since a request may arrive, and at least in each step


class SuffixDrafter(Drafter):
    """Proposes what followed the longest suffixes of the sequence in earlier text, likeliest first.

    The texts are the request's own prompt, output and prediction, its session's earlier texts, and the finished texts
    of requests with the same salt. ``fim`` splits fill-in-the-middle prompts: the next token follows the text before
    the cursor, and a finished text is stored as the completed document. shared_tokens: see `TextLibrary`.
    """

    name = "suffix"

    def __init__(self, shared_tokens: int, fim: FimParser | None = None) -> None:
        self._fim = fim
        self._library = TextLibrary(shared_tokens)
        self._readers: dict[Sequence, SuffixReader] = {}

    def begin(self, sequence: Sequence) -> None:
        """Start an index; `match` fills it while the prompt is prefilled."""
        self._readers[sequence] = SuffixReader(sequence, self._library.stores(sequence.request), self._fim)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        """See `Drafter`; indexes new tokens and stores finished texts, a bounded number per call."""
        budget = INDEXED_PER_STEP
        found = []
        for sequence in sequences:
            reader = self._readers[sequence]
            reader.read(sequence.tokens)
            budget -= reader.index(budget)
            contexts = reader.contexts()
            found.append(match_of(contexts[0][2] if contexts else 0))
        self._library.work(max(budget, WRITTEN_AT_ONCE))
        return found

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        expand(task, tree, self._readers[task.sequence].contexts(), children)

    def end(self, sequence: Sequence) -> None:
        """Store the sequence's text for later ones."""
        reader = self._readers.pop(sequence, None)
        if reader is not None:
            reader.read(sequence.tokens)
            self._library.add(sequence.request, reader.document)

    def idle(self) -> bool:
        self._library.work(WRITTEN_AT_ONCE)
        return self._library.is_behind
