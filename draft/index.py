"""Drafts from the server owner's own files: what followed the longest suffix of the sequence in an index of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path

from draft.best_first import MAX_CONTEXTS, Child, expand, share_out, trust
from draft.protocol import Drafter, DraftTask
from draft.reading_order import ReadingOrder
from draft.token_index import LONGEST, Span, TokenIndex, stamp_of
from specdec.core.fields import MAX_INDEXES
from specdec.core.sequence import Sequence
from specdec.core.tree import TokenTree
from specdec.errors import ConfigError

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
    """The indexes that a server's owner named, opened; one whose file was replaced is opened again when next asked for.

    fingerprint: of the vocabulary that they must be in.

    Raises:
        ConfigError: one can not be used; names it, its file and the way out.
    """

    def __init__(self, paths: Mapping[str, Path], fingerprint: str) -> None:
        self._fingerprint = fingerprint
        self._indexes = {name: self._open(name, path.expanduser()) for name, path in paths.items()}
        self._refused: dict[str, tuple[int, int, int]] = {}

    def get(self, names: Seq[str] | None) -> list[TokenIndex]:
        """Those of ``names``, None: all, `MAX_INDEXES` at most; unknown ones are left out."""
        known = [name for name in dict.fromkeys(self._indexes if names is None else names) if name in self._indexes]
        return [self._current(name) for name in known[:MAX_INDEXES]]

    def _current(self, name: str) -> TokenIndex:
        index = self._indexes[name]
        try:
            stamp = stamp_of(index.path.stat())
        except OSError:  # gone: what is mapped is still there
            return index
        if stamp != index.stamp and stamp != self._refused.get(name):
            try:
                # Unchecked, since everybody's next step waits for it; it was renamed into its place, so it is whole.
                index = self._indexes[name] = self._open(name, index.path, check=False)
            except ConfigError as error:
                _LOG.warning("%s; the former one stays in use", error)
                self._refused[name] = stamp
        return index

    def _open(self, name: str, path: Path, *, check: bool = True) -> TokenIndex:
        try:
            index = TokenIndex(path, check=check)
        except ConfigError as error:
            raise ConfigError(f"engine.indexes.{name}: {error}") from None
        if index.header.fingerprint != self._fingerprint:
            raise ConfigError(
                f"engine.indexes.{name}: index {path} was built with the tokenizer of another model; build it with "
                "that of this one: specdec index --out FILE --target MODEL"
            )
        return index


class _Reader:
    """The end of one sequence's text, as it is read, and the indexes it may draft from."""

    __slots__ = ("_n_read", "indexes", "tail")

    def __init__(self, sequence: Sequence, indexes: list[TokenIndex], order: ReadingOrder | None) -> None:
        prompt = sequence.tokens
        self.indexes = indexes
        if order is None:
            self.tail = list(prompt[-LONGEST:])
        else:
            parts = order.parts(prompt)
            self.tail = (parts.prefix + parts.middle)[-LONGEST:]
        self._n_read = len(prompt)

    def read(self, tokens: Seq[int]) -> None:
        if len(tokens) > self._n_read:
            self.tail = [*self.tail, *tokens[self._n_read :]][-LONGEST:]
            self._n_read = len(tokens)


class IndexDrafter(Drafter):
    """Continues the longest suffix of the sequence that an index holds, by counts, best first.

    Looks in the indexes that the request names, or in all. ``order``: as of the `suffix` drafter.
    """

    name = "index"

    def __init__(self, shelf: IndexShelf, order: ReadingOrder | None = None) -> None:
        self._shelf, self._order = shelf, order
        self._readers: dict[Sequence, _Reader] = {}

    def serves(self, sequence: Sequence) -> bool:
        """Whether it may draft from any index."""
        return sequence.request.speculation.indexes != ()

    def begin(self, sequence: Sequence) -> None:
        """Take the indexes as they are now."""
        indexes = self._shelf.get(sequence.request.speculation.indexes)
        self._readers[sequence] = _Reader(sequence, indexes, self._order)

    def propose(self, tasks: Seq[DraftTask]) -> list[TokenTree]:
        """Continue each sequence."""
        trees = []
        for task in tasks:
            tokens = task.sequence.tokens
            tree = TokenTree(tokens[-1])
            if task.max_nodes > 0 and task.max_depth > 0:
                reader = self._readers[task.sequence]
                reader.read(tokens)
                contexts = [span for index in reader.indexes for span in index.match(reader.tail)]
                if contexts:
                    contexts.sort(key=_by_length)
                    expand(task, tree, contexts[:MAX_CONTEXTS], children)
            trees.append(tree)
        return trees

    def end(self, sequence: Sequence) -> None:
        """Forget the sequence."""
        self._readers.pop(sequence, None)


def _by_length(span: Span) -> int:
    return -span[3]
