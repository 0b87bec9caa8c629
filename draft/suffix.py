"""Drafts from earlier text: what followed the longest suffix of the sequence there."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Sequence as Seq

from draft.lookups import Reader, match_of
from draft.protocol import Drafter, DraftTask
from draft.text_store import BREAK, TextLibrary, TextStore
from specdec.control.inputs import Match
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.models.fim import FimParser, FimParts


class SuffixReader(Reader):
    """Indexes a sequence's prediction, prompt and output, and matches its end in the texts of ``stores``."""

    def __init__(
        self, library: ctypes.PyDLL, sequence: Sequence, stores: list[TextStore], fim: FimParser | None = None
    ) -> None:
        prompt = sequence.tokens
        parts = fim.parts(prompt) if fim else FimParts([], prompt, [], [])
        self._text = array("i", parts.head + parts.prefix + parts.middle)  # up to the cursor, with the output
        self._after = array("i", parts.suffix)
        self._n_read = len(prompt)
        self._stores = stores  # the native reader reads them
        other = array("i")
        for part in (sequence.request.prediction_ids, self._after):
            if part:
                other.extend(part)
                other.append(BREAK)
        handles = (ctypes.c_void_p * len(stores))(*[store._as_parameter_ for store in stores])
        super().__init__(library, "suffix", handles, len(stores), *other.buffer_info())
        self._match = library.sd_suffix_match

    def document(self, tokens: Seq[int]) -> array[int]:
        """The whole text, in the order of the document. tokens: all of the sequence's."""
        self._read(tokens)
        return self._text + self._after

    def match(self, tokens: Seq[int], budget: ctypes.c_int64) -> int:
        """Index at most ``budget`` of the sequence's ``tokens``, reduce ``budget`` by their number, and look for the
        longest suffixes of the text; returns the tokens of the longest one."""
        self._read(tokens)
        return self._match(self, *self._text.buffer_info(), budget)

    def _read(self, tokens: Seq[int]) -> None:
        self._text.extend(tokens[self._n_read :])
        self._n_read = len(tokens)


INDEXED_PER_STEP = 4096  # tokens of all sequences together: a long prompt must not delay the step


class SuffixDrafter(Drafter):
    """Proposes what followed the longest suffixes of the sequence in earlier text, likeliest first.

    The texts are the request's own prompt, output and prediction, its session's earlier texts, and the finished texts
    of requests with the same salt. ``fim`` splits fill-in-the-middle prompts: the next token follows the text before
    the cursor, and a finished text is stored as the completed document. shared_tokens: see `TextLibrary`.
    """

    name = "suffix"

    def __init__(self, library: ctypes.PyDLL, shared_tokens: int, fim: FimParser | None = None) -> None:
        self._native, self._fim = library, fim
        self._texts = TextLibrary(library, shared_tokens)
        self._readers: dict[Sequence, SuffixReader] = {}

    def begin(self, sequence: Sequence) -> None:
        """Start an index; `match` fills it while the prompt is prefilled."""
        self._readers[sequence] = SuffixReader(self._native, sequence, self._texts.stores(sequence.request), self._fim)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        """See `Drafter`; indexes a bounded number of new tokens per call."""
        budget = ctypes.c_int64(INDEXED_PER_STEP)
        return [match_of(self._readers[sequence].match(sequence.tokens, budget)) for sequence in sequences]

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        self._readers[task.sequence].fill(task, tree)

    def end(self, sequence: Sequence) -> None:
        """Store the sequence's text for later ones."""
        reader = self._readers.pop(sequence, None)
        if reader is not None:
            self._texts.add(sequence.request, reader.document(sequence.tokens))
