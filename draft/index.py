"""Drafts from an index of the server owner's files: what followed the longest suffix of the sequence there."""

from __future__ import annotations

import ctypes
import logging
from array import array
from collections.abc import Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from draft.lookups import Reader, match_of
from draft.protocol import Drafter, DraftTask
from draft.token_index import IndexText, TokenIndex, file_version
from specdec.control.inputs import Match
from specdec.core.fields import MAX_INDEXES
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.errors import ConfigError
from specdec.models.fim import FimParser, FimParts

_LOG = logging.getLogger(__name__)


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


MAX_CONTEXT_TOKENS = 32  # tokens of a context that are looked up; a longer match predicts no better


class IndexReader(Reader):
    """The last tokens of a sequence's text, and the indexes that it may draft from."""

    def __init__(
        self, library: ctypes.PyDLL, sequence: Sequence, indexes: list[TokenIndex], fim: FimParser | None
    ) -> None:
        super().__init__(library, "index")
        self._match, self._indexes = library.sd_index_match, indexes
        self._texts = (ctypes.POINTER(IndexText) * len(indexes))(*[ctypes.pointer(index.text) for index in indexes])
        parts = fim.parts(sequence.tokens) if fim else FimParts([], sequence.tokens, [], [])
        self._context = array("i", (parts.prefix + parts.middle)[-MAX_CONTEXT_TOKENS:])
        self._n_read = len(sequence.tokens)

    def match(self, tokens: Seq[int]) -> int:
        """Append the new ones of ``tokens``, all of the sequence's, and look for the longest suffixes of the text;
        returns the tokens of the longest one."""
        self._context.extend(tokens[self._n_read :])
        del self._context[:-MAX_CONTEXT_TOKENS]
        self._n_read = len(tokens)
        return self._match(self, self._texts, len(self._indexes), *self._context.buffer_info())


class IndexDrafter(Drafter):
    """Proposes what followed the longest suffix of the sequence in the indexes that its request names, or in all."""

    name = "index"

    def __init__(self, library: ctypes.PyDLL, shelf: IndexShelf, fim: FimParser | None = None) -> None:
        self._native, self._shelf, self._fim = library, shelf, fim
        self._readers: dict[Sequence, IndexReader] = {}

    def serves(self, sequence: Sequence) -> bool:
        """Whether its request allows an index."""
        return sequence.request.speculation.indexes != ()

    def begin(self, sequence: Sequence) -> None:
        """The sequence drafts from the present versions of the indexes until it ends."""
        indexes = self._shelf.get(sequence.request.speculation.indexes)
        self._readers[sequence] = IndexReader(self._native, sequence, indexes, self._fim)

    def match(self, sequences: Seq[Sequence]) -> list[Match]:
        return [match_of(self._readers[sequence].match(sequence.tokens)) for sequence in sequences]

    def fill(self, task: DraftTask, tree: TokenTree) -> None:
        self._readers[task.sequence].fill(task, tree)

    def end(self, sequence: Sequence) -> None:
        self._readers.pop(sequence, None)
