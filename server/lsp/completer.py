"""Answers an editor's requests for inline completion, and reports the outcome of suggestions to the server."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from lsprotocol import types

from server.completion.documents import OffsetUnit
from server.lsp.documents import (
    DocumentTable,
    OpenDocument,
    Project,
    folders_of,
    may_suggest,
    read_settings,
)
from server.lsp.inline_edits import InlineEdits
from server.lsp.session import Answer, Notices, SessionLink, SuggestionRequest
from specdec.client.client import Client, Outcome

REMEMBERED = 512  # suggestions whose outcome can still be reported
Report = Callable[[str, Outcome], Awaitable[None]]


class _Given:
    """A suggestion whose first ``lead`` characters come from the editor's own menu."""

    def __init__(self, text: str, lead: int) -> None:
        self.text, self.lead = text, lead
        self.shown = self.partly_taken = False


class Outcomes:
    """Passes outcomes to ``report``, in order and one at a time."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._given: OrderedDict[str, _Given] = OrderedDict()  # neither accepted nor dismissed
        self._unreported = set[asyncio.Task[None]]()
        self._turn = asyncio.Lock()

    async def settle(self) -> None:
        """Wait for the remaining reports, for a second at most."""
        if self._unreported:
            await asyncio.wait(self._unreported, timeout=1.0)

    def given(self, suggestion_id: str, text: str, lead: int) -> None:
        """The editor got ``text``, whose first ``lead`` characters are not the model's."""
        self._given[suggestion_id] = _Given(text, lead)
        while len(self._given) > REMEMBERED:
            self._given.popitem(last=False)

    def shown(self, suggestion_id: str) -> None:
        found = self._given.get(suggestion_id)
        if found is not None and not found.shown:
            found.shown = True
            self._queue(suggestion_id, "shown")

    def accepted(self, suggestion_id: str) -> None:
        if self._given.pop(suggestion_id, None) is not None:
            self._queue(suggestion_id, "accepted")

    def partly_accepted(self, suggestion_id: str, length: int) -> None:
        """The user accepted its first ``length`` UTF-16 units."""
        found = self._given.get(suggestion_id)
        if found is None:
            return
        end = OffsetUnit.UTF16.place_in(found.text, length)
        if end >= len(found.text):
            self.accepted(suggestion_id)
        elif end > found.lead and not found.partly_taken:
            found.partly_taken = True
            self._queue(suggestion_id, "partially_accepted")

    def dismissed(self, suggestion_id: str) -> None:
        """The user rejected it, or the rest of it."""
        found = self._given.pop(suggestion_id, None)
        if found is not None and not found.partly_taken:
            self._queue(suggestion_id, "rejected")

    def _queue(self, suggestion_id: str, outcome: Outcome) -> None:
        task = asyncio.create_task(self._send(suggestion_id, outcome), name="lsp-outcome")
        self._unreported.add(task)
        task.add_done_callback(self._unreported.discard)

    async def _send(self, suggestion_id: str, outcome: Outcome) -> None:
        async with self._turn:
            await self._report(suggestion_id, outcome)


PAUSE_S = 0.15  # without keys, after which prompts are read ahead
CHOICES = 3  # suggestions on explicit request
_WORD = re.compile(r"[A-Za-z0-9_]+\Z")
ACCEPT_COMMAND = "specdec.didAcceptCompletion"


class Completer:
    """Completes one request at a time; a newer request makes older ones return nothing."""

    def __init__(self, documents: DocumentTable, link: SessionLink, outcomes: Outcomes) -> None:
        self._documents, self._link, self._outcomes = documents, link, outcomes
        self._latest = 0
        self._reading: asyncio.Task[None] | None = None

    def touched(self, document: OpenDocument) -> None:
        """The user does something in ``document``: stop reading ahead, and begin again after a pause of `PAUSE_S`."""
        self.stop_reading()
        if self._link.settings.ttft_ms and self._wanted(document, invoked=False):
            self._reading = asyncio.create_task(self._read_ahead(document), name="lsp-read-ahead")

    def stop_reading(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    async def _read_ahead(self, document: OpenDocument) -> None:
        await asyncio.sleep(PAUSE_S)
        request = self._request(document, document.touched)
        await self._link.read_ahead(dataclasses.replace(request, read_ahead=True))

    async def complete(self, params: types.InlineCompletionParams) -> list[types.InlineCompletionItem]:
        """At most one item, or `CHOICES` on explicit request. The position refers to the document at the time of the
        call.

        Raises:
            BeyondDocumentError: the document has no such line.
        """
        document = self._documents.get(params.text_document.uri)
        invoked = params.context.trigger_kind is types.InlineCompletionTriggerKind.Invoked
        if document is None or not self._wanted(document, invoked):
            return []
        self.stop_reading()
        self._latest += 1
        place = document.completed_at(params.position)
        turn, request = self._latest, self._request(document, place, params.context.selected_completion_info)
        if not invoked and (debounce_ms := self._link.settings.debounce_ms):
            await asyncio.sleep(debounce_ms / 1e3)
            if turn != self._latest or document.revision != request.revision:
                return []
        try:
            found = await self._link.complete(request, CHOICES if invoked else 1)
        finally:
            if turn == self._latest and self._documents.get(document.uri) is document:  # still open
                self.touched(document)
        different: dict[str, Answer] = {}
        for answer in found:
            if answer.text.strip():
                different.setdefault(answer.text, answer)
        return [self._item(answer, params) for answer in different.values()]

    async def list_one(self, params: types.CompletionParams) -> types.CompletionList:
        """The suggestion as an item of the editor's menu, for editors without inline completion. It replaces the word
        before the position, by which editors filter the menu.

        Raises:
            BeyondDocumentError: the document has no such line.
        """
        context = types.InlineCompletionContext(types.InlineCompletionTriggerKind.Automatic)
        inline = types.InlineCompletionParams(context, params.text_document, params.position)
        items = await self.complete(inline)
        document = self._documents.get(params.text_document.uri)
        if document is None or not items:
            return types.CompletionList(is_incomplete=True, items=[])
        place = document.place(params.position)
        word = _WORD.search(document.text, max(0, place - 100), place)
        start = place if word is None else word.start()
        text = document.text[start:place] + str(items[0].insert_text)
        item = types.CompletionItem(
            label=text.strip().splitlines()[0], documentation=text, detail="specdec", command=items[0].command,
            text_edit=types.TextEdit(document.range_of(start, place), text),
            insert_text_mode=types.InsertTextMode.AsIs,  # the text has its file's indentation
        )  # fmt: skip
        return types.CompletionList(is_incomplete=True, items=[item])

    def _wanted(self, document: OpenDocument, invoked: bool) -> bool:
        settings = self._link.settings
        return may_suggest(document, settings) and (invoked or settings.mode == "auto")

    def _request(
        self, document: OpenDocument, place: int, menu: types.SelectedCompletionInfo | None = None
    ) -> SuggestionRequest:
        selected = None
        if menu is not None:
            start = document.place(menu.range.start)
            selected = (start, max(start, document.place(menu.range.end)), menu.text)
        extra = tuple(self._documents.beside(document, self._link.settings))
        return SuggestionRequest(
            document, document.revision, place, selected, extra, self._documents.project.repository_of(document.uri)
        )

    def _item(self, answer: Answer, params: types.InlineCompletionParams) -> types.InlineCompletionItem:
        menu = params.context.selected_completion_info
        lead = "" if menu is None else menu.text
        where = types.Range(params.position, params.position) if menu is None else menu.range
        self._outcomes.given(answer.suggestion_id, lead + answer.text, len(lead))
        command = types.Command("Accept", ACCEPT_COMMAND, arguments=[answer.suggestion_id])
        return types.InlineCompletionItem(insert_text=lead + answer.text, range=where, command=command)


class Workplace:
    """The state of one editor, created at `initialize`. `start` it after the answer, and `close` it."""

    def __init__(
        self,
        params: types.InitializeParams,
        unit: OffsetUnit,
        connect: Callable[[int], Client],
        notices: Notices,
    ) -> None:
        self._notices = notices
        settings, self._problems = read_settings(params.initialization_options)
        self.project = Project(folders_of(params))
        self.documents = DocumentTable(self.project, unit)
        self.link = SessionLink(connect, settings, notices)
        self.outcomes = Outcomes(self.link.report)
        self.completer = Completer(self.documents, self.link, self.outcomes)
        self.edits = InlineEdits(self.documents, self.link, notices)

    def start(self) -> None:
        """Connect to the server, unless the settings forbid it."""
        self._notices.over("settings")
        if self._problems:
            self._notices.warn("settings", "; ".join(self._problems))
        self.link.start()

    async def close(self) -> None:
        """Report the remaining outcomes, and end the session."""
        await self.outcomes.settle()
        self.edits.cancel()
        self.completer.stop_reading()
        await self.link.close()

    def configure(self, given: Any) -> None:
        if isinstance(given, dict):
            settings, self._problems = read_settings(given, self.link.settings)
            self.link.configure(settings)
            self.start()

    def open_document(self, item: types.TextDocumentItem) -> None:
        self.completer.touched(self.documents.open(item))

    def change_document(self, params: types.DidChangeTextDocumentParams) -> None:
        document = self.documents.get(params.text_document.uri)
        if document is not None:
            self.edits.apply(document, params.content_changes)
            self.completer.touched(document)

    def focus(self, uri: str) -> None:
        """The user looks at a document now."""
        document = self.documents.get(uri)
        if document is not None:
            document.use()
            self.completer.touched(document)

    async def next_edits(self, where: types.TextDocumentPositionParams, params: dict[str, Any]) -> list[dict[str, Any]]:
        """At most one edit, in Copilot's form. params: of the request, whose version of the document the edit repeats.

        Raises:
            BeyondDocumentError: the document has no such line.
        """
        invoked = (params.get("context") or {}).get("triggerKind") == types.InlineCompletionTriggerKind.Invoked.value
        uri = where.text_document.uri
        found, document = await self.edits.next_edit(uri, where.position, invoked=invoked), self.documents.get(uri)
        if found is None or document is None:
            return []
        edit, suggestion_id = found
        self.outcomes.given(suggestion_id, edit.text, 0)
        command = types.Command("Accept", ACCEPT_COMMAND, arguments=[suggestion_id])
        where_to = document.range_of(edit.start, edit.end)
        return [{"text": edit.text, "range": where_to, "textDocument": params["textDocument"], "command": command}]

    def dismissed(self, suggestion_id: str) -> None:
        """The user rejected a suggestion or a predicted edit."""
        self.outcomes.dismissed(suggestion_id)
        self.edits.dismissed(suggestion_id)

    def close_document(self, uri: str) -> None:
        document = self.documents.pop(uri, None)
        if document is not None:
            self.edits.cancel()
            self.completer.stop_reading()
            self.link.forget(document)
