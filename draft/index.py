"""Drafts from an index of the server owner's files: what followed the longest suffix of the sequence there."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from draft.best_first import MAX_CONTEXTS, Child, expand, match_of, share_out, trust
from draft.protocol import Drafter, DraftTask
from draft.token_index import MAX_CONTEXT_TOKENS, Span, TokenIndex, file_version
from specdec.control.inputs import Match
from specdec.core.fields import MAX_INDEXES
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.errors import ConfigError
from specdec.models.fim import FimParser, FimParts

_LOG = logging.getLogger(__name__)


def children(contexts: Seq[Span], width: int) -> list[Child[Span]]:
    """The ``width`` likeliest next tokens."""
    if len(contexts) == 1:  # most nodes of a long chain
        index, low, high, length, token = contexts[0]
        options = index.followers(low, high, length, token)
        if len(options) == 1:
            ((token, count, behind),) = options
            return [(trust(length, count), token, [behind])]
        return share_out([(length, options)], width) if options else []
    return share_out(_followers(contexts), width)


def _followers(contexts: Seq[Span]) -> Iterator[tuple[int, list[tuple[int, int, Span]]]]:
    for index, low, high, length, token in contexts:
        options = index.followers(low, high, length, token)
        if options:
            yield length, options


class IndexShelf:
    """The configured indexes, opened. An index whose file was replaced is reopened at its next use.

    paths: by name. fingerprint: of the vocabulary that the indexes must have.

    Raises:
        ConfigError: an index is missing, damaged or has another vocabulary; names the index and its file.
    """

    def __init__(self, paths: Mapping[str, Path], fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._indexes = {name: self._open(name, path) for name, path in paths.items()}

    def get(self, names: Seq[str] | None) -> list[TokenIndex]:
        """The indexes ``names`` (None: all), at most `MAX_INDEXES`; unknown names are skipped."""
        known = [name for name in dict.fromkeys(self._indexes if names is None else names) if name in self._indexes]
        return [self._current(name) for name in known[:MAX_INDEXES]]

    def _current(self, name: str) -> TokenIndex:
        index = self._indexes[name]
        try:
            version = file_version(index.path.stat())
        except OSError:  # deleted; the mapping stays readable
            return index
        if version != index.version:
            try:
                # Without the checksum, which would delay the step. The file was renamed into place, so it is complete.
                index = self._indexes[name] = self._open(name, index.path, check=False)
            except ConfigError as error:
                _LOG.warning("%s; the previous index stays in use", error)
                index.version = version  # of the file that is not tried again
        return index

    def _open(self, name: str, path: Path, *, check: bool = True) -> TokenIndex:
        try:
            index = TokenIndex(path, check=check)
        except ConfigError as error:
            raise ConfigError(f"engine.indexes.{name}: {error}") from None
        if index.header.fingerprint != self._fingerprint:
            raise ConfigError(
                f"engine.indexes.{name}: index {path} has the vocabulary of another model; build it for this one: "
                "specdec index PATH... --out FILE --target MODEL"
            )
        return index


class _Reader:
    """The last tokens of a sequence's text, and the indexes that it may draft from."""

    __slots__ = ("_context", "_indexes", "_n_read", "spans")

    def __init__(self, sequence: Sequence, indexes: list[TokenIndex], fim: FimParser | None) -> None:
        self._indexes = indexes
        parts = fim.parts(sequence.tokens) if fim else FimParts([], sequence.tokens, [], [])
        self._context = (parts.prefix + parts.middle)[-MAX_CONTEXT_TOKENS:]
        self._n_read = len(sequence.tokens)
        self.spans: list[Span] = []  # the longest matches of the text's end, at most MAX_CONTEXTS

    def match(self, tokens: Seq[int]) -> Match:
        """Append the new ones of ``tokens``, all of the sequence's, and match the end of the text."""
        self._context = [*self._context, *tokens[self._n_read :]][-MAX_CONTEXT_TOKENS:]
        self._n_read = len(tokens)
        found = [span for index in self._indexes for span in index.match(self._context)]
        self.spans = sorted(found, key=lambda span: -span[3])[:MAX_CONTEXTS]
        return match_of(self.spans[0][3] if self.spans else 0)


class IndexDrafter(Drafter):
    """Proposes what followed the longest suffix of the sequence in the indexes that its request names, or in all."""

    name = "index"

    def __init__(self, shelf: IndexShelf, fim: FimParser | None = None) -> None:
        self._shelf, self._fim = shelf, fim
        self._readers: dict[Sequence, _Reader] = {}

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request allows an index."""
        return sequence.request.speculation.indexes != ()

    def begin(self, sequence: Sequence) -> None:
        """The sequence drafts from the present versions of the indexes until it ends."""
        indexes = self._shelf.get(sequence.request.speculation.indexes)
        self._readers[sequence] = _Reader(sequence, indexes, self._fim)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        return [self._readers[sequence].match(sequence.tokens) for sequence in sequences]

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        expand(task, tree, self._readers[task.sequence].spans, children)

    def end(self, sequence: Sequence) -> None:
        self._readers.pop(sequence, None)
