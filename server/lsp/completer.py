"""Answers an editor's requests for inline completion, and tells the server what became of the suggestions."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import OrderedDict
from collections.abc import Awaitable, Callable
from typing import Any

from lsprotocol import types

from server.lsp.documents import (
    DocumentTable,
    OpenDocument,
    PositionEncoding,
    Project,
    Settings,
    folders_of,
    plain,
    read_settings,
    secret,
)
from server.lsp.session import Answer, LinkState, Notices, SessionLink, SuggestionRequest
from specdec.client.client import Client, Outcome

REMEMBERED = 512
_WAITING = 256
Report = Callable[[str, Outcome, int, float], Awaitable[None]]


class _Given:
    """A suggestion, behind ``lead`` characters that the editor's own menu put there."""

    def __init__(self, text: str, lead: int) -> None:
        self.text, self.lead = text, lead
        self.shown_s: float | None = None
        self.taken = 0
        self.closed = False


class Outcomes:
    """Tells them to ``report``, one after the other, in the background. ``clock`` gives monotonic seconds. `run` it."""

    def __init__(self, report: Report, clock: Callable[[], float] = time.monotonic) -> None:
        self._report, self._clock = report, clock
        self._given: OrderedDict[str, _Given] = OrderedDict()
        self._untold: asyncio.Queue[tuple[str, Outcome, int, float]] = asyncio.Queue(_WAITING)

    async def run(self) -> None:
        """Report until cancelled."""
        while True:
            told = await self._untold.get()
            await self._report(*told)
            self._untold.task_done()

    async def settle(self) -> None:
        """Wait until all was told."""
        await self._untold.join()

    def given(self, suggestion_id: str, text: str, lead: int) -> None:
        """The editor was given ``text``, whose first ``lead`` characters are not the model's."""
        self._given[suggestion_id] = _Given(text, lead)
        while len(self._given) > REMEMBERED:
            self._given.popitem(last=False)

    def shown(self, suggestion_id: str) -> None:
        """The user sees it."""
        found = self._given.get(suggestion_id)
        if found is not None and found.shown_s is None and not found.closed:
            found.shown_s = self._clock()
            self._tell(suggestion_id, found, "shown", 0)

    def accepted(self, suggestion_id: str) -> None:
        """The user took all of it."""
        found = self._given.get(suggestion_id)
        if found is not None and not found.closed:
            found.closed = True
            self._tell(suggestion_id, found, "accepted", len(found.text) - found.lead)

    def partly_accepted(self, suggestion_id: str, length: int) -> None:
        """The user took its first ``length`` 16-bit units."""
        found = self._given.get(suggestion_id)
        if found is None or found.closed:
            return
        characters = max(0, PositionEncoding.UTF16.place_in(found.text, length) - found.lead)
        if characters >= len(found.text) - found.lead:
            self.accepted(suggestion_id)
        elif characters > found.taken:
            found.taken = characters
            self._tell(suggestion_id, found, "partially_accepted", characters)

    def dismissed(self, suggestion_id: str) -> None:
        """The user did not want it, or no more of it."""
        found = self._given.get(suggestion_id)
        if found is not None and not found.closed:
            found.closed = True
            if not found.taken:
                self._tell(suggestion_id, found, "rejected", 0)

    def _tell(self, suggestion_id: str, found: _Given, outcome: Outcome, characters: int) -> None:
        shown_ms = 0.0 if found.shown_s is None else (self._clock() - found.shown_s) * 1e3
        if not self._untold.full():
            self._untold.put_nowait((suggestion_id, outcome, characters, shown_ms))


ACCEPT_COMMAND = "specdec.didAcceptCompletion"


class Completer:
    """One request at a time: while a newer one is there, older ones are answered with nothing."""

    def __init__(self, documents: DocumentTable, link: SessionLink, outcomes: Outcomes, settings: Settings) -> None:
        self._documents, self._link, self._outcomes = documents, link, outcomes
        self.settings = settings
        self._latest = 0

    async def complete(self, params: types.InlineCompletionParams) -> list[types.InlineCompletionItem]:
        """At most one item, empty where there is nothing to suggest. The place is that of the moment of the call.

        Raises:
            BeyondDocumentError: the document has no such line.
        """
        document = self._documents.get(params.text_document.uri)
        invoked = params.context.trigger_kind is types.InlineCompletionTriggerKind.Invoked
        if document is None or not self._wanted(document, invoked):
            return []
        self._latest += 1
        turn, ask = self._latest, self._ask(document, params)
        if not invoked and self.settings.debounce_ms:
            await asyncio.sleep(self.settings.debounce_ms / 1e3)
            if turn != self._latest or document.revision != ask.revision:
                return []
        answer = await self._link.ask(ask)
        if answer is None or not answer.text.strip():
            return []
        return [self._item(answer, ask, params)]

    def _wanted(self, document: OpenDocument, invoked: bool) -> bool:
        mode = self.settings.mode
        if mode == "off" or (mode == "manual" and not invoked):
            return False
        return document.language not in self.settings.disabled_languages and not secret(document.name, self.settings)

    def _ask(self, document: OpenDocument, params: types.InlineCompletionParams) -> SuggestionRequest:
        menu, selected = params.context.selected_completion_info, None
        place = document.ask_at(params.position)
        if menu is not None:
            start = document.place(menu.range.start)
            selected = (start, max(start, document.place(menu.range.end)), menu.text)
        extra = tuple(self._documents.beside(document, self.settings))
        return SuggestionRequest(
            document, document.revision, place, selected, extra, self._documents.project.repository_of(document.uri)
        )

    def _item(
        self, answer: Answer, ask: SuggestionRequest, params: types.InlineCompletionParams
    ) -> types.InlineCompletionItem:
        menu = params.context.selected_completion_info
        lead = "" if menu is None else menu.text
        where = types.Range(params.position, params.position) if menu is None else menu.range
        self._outcomes.given(answer.suggestion_id, lead + answer.text, len(lead))
        command = types.Command("Accept", ACCEPT_COMMAND, arguments=[answer.suggestion_id])
        return types.InlineCompletionItem(insert_text=lead + answer.text, range=where, command=command)


class Workplace:
    """Made when the editor says who it is. `start` it once that is answered, and `close` it."""

    def __init__(
        self,
        params: types.InitializeParams,
        encoding: PositionEncoding,
        connect: Callable[[], Client],
        notices: Notices,
    ) -> None:
        self._notices = notices
        settings, self._problems = read_settings(plain(params.initialization_options))
        self.project = Project(folders_of(params))
        self.documents = DocumentTable(self.project, encoding)
        self.link = SessionLink(connect, settings, notices)
        self.outcomes = Outcomes(self.link.report)
        self.completer = Completer(self.documents, self.link, self.outcomes, settings)
        self._reporting: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Look for the server."""
        self._reporting = asyncio.create_task(self.outcomes.run(), name="lsp-outcomes")
        self._apply()

    async def close(self) -> None:
        """Tell what is still to be told, as far as that is quick, and end the session."""
        if self._reporting is not None:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.outcomes.settle(), 1.0)
            self._reporting.cancel()
            await asyncio.wait([self._reporting])
            self._reporting = None
        await self.link.close()

    def configure(self, told: Any) -> None:
        """The editor's settings have changed."""
        if isinstance(told, dict):
            self.completer.settings, self._problems = read_settings(told, self.completer.settings)
            self.link.configure(self.completer.settings)
            self._apply()

    def close_document(self, uri: str) -> None:
        """The editor closed a document."""
        document = self.documents.close(uri)
        if document is not None:
            self.link.forget(document)

    def _apply(self) -> None:
        self._notices.over("settings")
        if self._problems:
            self._notices.tell("settings", "; ".join(self._problems))
        if self.completer.settings.mode == "off":
            self._notices.state(LinkState.OFF)
            self.link.stop()
        else:
            self.link.start()
