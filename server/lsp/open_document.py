"""A document that is open in the editor."""

from __future__ import annotations

import itertools
import time
from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from lsprotocol import types

from server.lsp.position_encoding import PositionEncoding
from server.lsp.synced_text import SyncedText
from specdec.api.v1 import completion_pb2 as pb

LOGGED = 256  # edits after which the whole text is sent instead
_REVISIONS = itertools.count(1)


class _Logged(NamedTuple):
    revision: int  # what the edit led to
    edit: pb.TextEdit


class OpenDocument:
    """``name``: what the server and the model know it by. ``revision``: names this very text; no other text of this
    process has it, so that a server that holds it holds this text, even after the document was closed and opened.
    ``used_ms``: when it was last changed or asked for, Unix time. ``touched``: index of the last change or ask."""

    def __init__(self, uri: str, name: str, language: str, text: str, encoding: PositionEncoding) -> None:
        self.uri, self.name, self.language = uri, name, language
        self._encoding = encoding
        self._content = SyncedText(text, encoding)
        self._log: deque[_Logged] = deque(maxlen=LOGGED)
        self.revision = self._log_from = next(_REVISIONS)
        self.touched = 0
        self.used_ms = _now_ms()

    @property
    def text(self) -> str:
        """All of it."""
        return self._content.text

    def place(self, position: types.Position) -> int:
        """The index of a position."""
        return self._content.place(position.line, position.character)

    def apply(self, changes: Iterable[types.TextDocumentContentChangeEvent]) -> None:
        """Follow the editor, change by change."""
        for change in changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start = self.place(change.range.start)
                end = max(start, self.place(change.range.end))
                self._replace(start, end, change.text)
            else:
                self._content = SyncedText(change.text, self._encoding)
                self._log.clear()
                self.revision = self._log_from = next(_REVISIONS)
        self.used_ms = _now_ms()

    def edits_since(self, revision: int | None) -> Sequence[pb.TextEdit] | None:
        """What leads from a revision to this one, offsets in code points; None: it is better to send the text."""
        if revision == self.revision:
            return ()
        if revision is None or revision < self._log_from:
            return None
        edits = [logged.edit for logged in self._log if logged.revision > revision]
        return edits if sum(len(edit.text) for edit in edits) < len(self.text) else None

    def ask_at(self, position: types.Position) -> int:
        """The index of a position at which a completion is wanted."""
        self.touched, self.used_ms = self.place(position), _now_ms()
        return self.touched

    def excerpt(self, characters: int) -> str:
        """Whole lines around the place that was touched last, more of those in front of it. It stays what it is for as
        long as nobody works in the document, so that prompts begin alike."""
        if len(self.text) <= characters:
            return self.text
        start = max(0, min(self.touched - characters * 2 // 3, len(self.text) - characters))
        if start:
            start = self.text.find("\n", start - 1, start + characters) + 1 or start
        end = min(len(self.text), start + characters)
        if end < len(self.text):
            end = self.text.rfind("\n", start, end) + 1 or end
        return self.text[start:end]

    def _replace(self, start: int, end: int, text: str) -> None:
        self._content.replace(start, end, text)
        if len(self._log) == LOGGED:
            self._log_from = self._log[0].revision
        self.revision = next(_REVISIONS)
        edit = pb.TextEdit(start=start, end=end, text=self.text[start : start + len(text)])
        self._log.append(_Logged(self.revision, edit))
        self.touched = start + len(text)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
