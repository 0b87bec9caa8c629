"""Predicts an editor's next edits: the user's recent changes, the requests, and the edits given one at a time."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections import deque
from collections.abc import Iterable
from contextlib import aclosing
from dataclasses import dataclass

import grpc
from lsprotocol import types

from server.completion.documents import MAX_CHARACTERS
from server.lsp.documents import DocumentTable, OpenDocument, may_suggest, secret
from server.lsp.session import Notices, SessionLink, setup_of
from specdec.api.v1 import completion_pb2 as pb
from specdec.client.client import Client
from specdec.client.connection import CallError
from specdec.models.next_edit import trained_form

RECENT_EDITS, EDIT_CHARACTERS = 16, 4096  # kept, and of one with its context; the server reads no more
_CONTEXT_LINES = 3  # unchanged lines on each side of an edit
_EDIT_LINES = 20  # an edit that would change more lines is two
_DISMISSED = 64  # texts in which an edit was dismissed, of all documents


@dataclass(slots=True)
class _Run:
    """Changes in one place of a document, which together are one edit."""

    document: OpenDocument
    before: str  # the text before the first of them
    first: int  # lines that they changed, in the text after the last of them
    last: int

    def extend(self, document: OpenDocument, change: types.TextDocumentContentChangePartial) -> bool:
        """Add a change of the same or the next line; returns False if it is elsewhere."""
        start, end = change.range.start.line, change.range.end.line
        if document is not self.document or start > self.last + 1 or end < self.first - 1:
            return False
        first, last = min(self.first, start), max(self.last, end) - (end - start) + change.text.count("\n")
        if last - first >= _EDIT_LINES:
            return False
        self.first, self.last = first, last
        return True

    def edit(self) -> pb.RecentEdit | None:
        """The edit that led to the document's text; None if it changed nothing or is too long."""
        text, place = self.document.text, self.document.place
        start = place(types.Position(max(0, self.first - _CONTEXT_LINES), 0))
        end = place(types.Position(self.last + 1 + _CONTEXT_LINES, 0))
        before, after = self.before[start : len(self.before) - (len(text) - end)], text[start:end]
        if before == after or len(before) + len(after) > EDIT_CHARACTERS:
            return None
        return pb.RecentEdit(path=self.document.name, before=before, after=after)


class EditHistory:
    """What the user changed, oldest first, in all documents. Changes in one place are one edit."""

    def __init__(self) -> None:
        self._edits: deque[pb.RecentEdit] = deque(maxlen=RECENT_EDITS)
        self._run: _Run | None = None

    def add(self, document: OpenDocument, change: types.TextDocumentContentChangeEvent) -> None:
        """Record a change before ``document`` gets it."""
        fresh = None
        if isinstance(change, types.TextDocumentContentChangePartial):
            if self._run is not None and self._run.extend(document, change):
                return
            start = change.range.start.line
            fresh = _Run(document, document.text, start, start + change.text.count("\n"))
        # Another program replaced a text that is sent as a whole.
        self._edits.extend(self._running())
        self._run = fresh

    def recent(self) -> list[pb.RecentEdit]:
        return [*self._edits, *self._running()][-RECENT_EDITS:]

    def _running(self) -> list[pb.RecentEdit]:
        """The edit that may still go on."""
        edit = None if self._run is None else self._run.edit()
        return [] if edit is None else [edit]


DEBOUNCE_SHARE = 0.25  # of the time that an answer takes: typing then wastes little of the server's time
MAX_DEBOUNCE_S = 0.3


class _Prediction:
    """An answer of the server while it comes. Its edits apply one after the other."""

    def __init__(self, client: Client, document: OpenDocument, message: pb.PredictEditRequest) -> None:
        self.document, self.request_id = document, message.request_id
        self.text = document.text  # the document's text once every edit that was given is applied
        self._given, self._shift = 0, 0  # edits, and by how much they moved what follows them
        self._waits = False  # whether `next` waits for one
        self._edits: asyncio.Queue[pb.TextEdit | None] = asyncio.Queue()
        self._reading = asyncio.create_task(self._read(client, message), name="lsp-next-edit")
        # Not in `_read`, which does not begin if it is cancelled at once
        self._reading.add_done_callback(lambda _: self._edits.put_nowait(None))

    def cancel(self) -> None:
        self._reading.cancel()

    def is_taken(self, document: OpenDocument) -> bool:
        """Whether every edit that was given is in ``document``, nothing else changed, and no caller waits for more."""
        return self._given > 0 and not self._waits and document is self.document and document.text == self.text

    async def next(self) -> pb.TextEdit | None:
        """The next edit, with offsets in the text after those before it; None: there is none.

        Raises:
            CallError: the server does not answer.
        """
        self._waits = True
        edit = await self._edits.get()
        self._waits = False
        if edit is None:
            self._edits.put_nowait(None)
            if not self._reading.cancelled() and (error := self._reading.exception()) is not None:
                raise error
            return None
        self._given += 1
        found = pb.TextEdit(start=edit.start + self._shift, end=edit.end + self._shift, text=edit.text)
        self.text = self.text[: found.start] + found.text + self.text[found.end :]
        self._shift += len(edit.text) - (edit.end - edit.start)
        return found

    async def _read(self, client: Client, message: pb.PredictEditRequest) -> None:
        async with aclosing(client.completion.predict_edit(message)) as events:
            async for event in events:
                if event.HasField("edit"):
                    self._edits.put_nowait(event.edit)


class InlineEdits:
    """Answers requests for the next edit. A newer request or a change ends the one before, except that after a taken
    edit the rest of its answer comes without another request."""

    def __init__(self, documents: DocumentTable, link: SessionLink, notices: Notices) -> None:
        self._documents, self._link, self._notices = documents, link, notices
        self.history = EditHistory()
        self._answer_s = 0.0  # what an answer takes until its first edit, or its end: the last ones weigh most
        self._prediction: _Prediction | None = None
        self._given = ("", 0)  # the last edit: its request's id, and the revision of the text
        self._dismissed: deque[int] = deque(maxlen=_DISMISSED)  # revisions of the texts in which the user dismissed one
        self._latest = 0

    def apply(self, document: OpenDocument, changes: Iterable[types.TextDocumentContentChangeEvent]) -> None:
        """Change ``document`` and record what changed."""
        recorded = not secret(document.name, self._link.settings)
        for change in changes:
            if recorded:
                self.history.add(document, change)
            document.apply([change])
        found = self._prediction
        if found is not None and (found.document is not document or found.text != document.text):
            self.cancel()

    def cancel(self) -> None:
        if self._prediction is not None:
            self._prediction.cancel()
            self._prediction = None

    def dismissed(self, request_id: str) -> None:
        """The user rejected an edit: the text gets no other one unasked."""
        if request_id == self._given[0]:
            self._dismissed.append(self._given[1])
            if self._prediction is not None and self._prediction.request_id == request_id:  # else of a newer text
                self.cancel()

    async def next_edit(self, uri: str, position: types.Position, *, invoked: bool) -> tuple[pb.TextEdit, str] | None:
        """The next edit, with offsets in the current text, and the id to report it by; None: there is none.

        Raises:
            BeyondDocumentError: the document has no such line.
        """
        document = self._documents.get(uri)
        if document is None:
            return None
        place, revision = document.completed_at(position), document.revision
        if not self._wanted(document, invoked):
            return None
        self._latest += 1
        turn = self._latest
        try:
            found, edit = self._prediction, None
            if found is not None and found.is_taken(document):
                edit = await self._next(found)
            if edit is None:
                if turn != self._latest:  # a newer request has ended this one
                    return None
                self.cancel()
                if not invoked:
                    await asyncio.sleep(self._debounce_s())
                client = self._link.client
                if client is None or turn != self._latest or document.revision != revision:
                    return None
                found = self._prediction = _Prediction(client, document, self._message(document, place))
                begun_s = time.monotonic()
                edit = await self._next(found)
                if self._prediction is found:  # else a newer request or a change has ended it
                    self._answer_s = (self._answer_s + time.monotonic() - begun_s) / 2
        except CallError as error:
            if error.code is not grpc.StatusCode.CANCELLED:  # this client was closed, for another model or server
                self._notices.edits(str(error))
            return None
        except asyncio.CancelledError:
            if turn == self._latest:
                self.cancel()
            raise
        if found is None or edit is None or turn != self._latest or document.revision != revision:
            return None
        if not self._wanted(document, invoked):  # dismissed, or other settings, while it came
            return None
        self._given = (found.request_id, revision)
        return edit, found.request_id

    def _debounce_s(self) -> float:
        """Time without a change before a request is sent."""
        return max(self._link.settings.debounce_ms / 1e3, min(MAX_DEBOUNCE_S, self._answer_s * DEBOUNCE_SHARE))

    def _wanted(self, document: OpenDocument, invoked: bool) -> bool:
        settings, model = self._link.settings, self._link.model
        if not (settings.next_edits and may_suggest(document, settings)) or len(document.text) > MAX_CHARACTERS:
            return False
        if not settings.edit_model and model and trained_form(model) is None:
            self._notices.edits(f"the model {model} is not trained on next edits; name one that is in editModel")
            return False
        if invoked:
            return True
        return settings.mode == "auto" and document.revision not in self._dismissed and bool(self.history.recent())

    async def _next(self, prediction: _Prediction) -> pb.TextEdit | None:
        with self._notices.busy():
            edit = await prediction.next()
            self._notices.edits("")
            return edit

    def _message(self, document: OpenDocument, place: int) -> pb.PredictEditRequest:
        settings = self._link.settings
        setup = setup_of(settings, "")
        recent = [edit for edit in self.history.recent() if not secret(edit.path, settings)]  # as excluded by now
        return pb.PredictEditRequest(
            request_id=uuid.uuid4().hex, model=settings.edit_model or settings.model or self._link.model,
            path=document.name, text=document.text, cursor=place, unit=setup.unit, recent=recent,
            extra=self._documents.beside(document, settings), max_prompt_tokens=settings.max_prompt_tokens,
            speculation=setup.speculation, cache=setup.cache,
        )  # fmt: skip
