"""Answers inline completion requests."""

from __future__ import annotations

import asyncio

from lsprotocol import types

from server.lsp.answer import Answer
from server.lsp.ask import Ask
from server.lsp.document_table import DocumentTable, secret
from server.lsp.open_document import OpenDocument
from server.lsp.outcomes import Outcomes
from server.lsp.session_link import SessionLink
from server.lsp.settings import Settings

ACCEPT_COMMAND = "specdec.didAcceptCompletion"


class Completer:
    """One request at a time: while a newer one is there, older ones are answered with nothing."""

    def __init__(self, documents: DocumentTable, link: SessionLink, outcomes: Outcomes, settings: Settings) -> None:
        self._documents, self._link, self._outcomes = documents, link, outcomes
        self.settings = settings
        self._latest = 0

    async def complete(self, params: types.InlineCompletionParams) -> list[types.InlineCompletionItem]:
        """At most one item, empty where there is nothing to suggest. The place is that of the moment of the call."""
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

    def _ask(self, document: OpenDocument, params: types.InlineCompletionParams) -> Ask:
        menu, selected = params.context.selected_completion_info, None
        place = document.ask_at(params.position)
        if menu is not None:
            start = document.place(menu.range.start)
            selected = (start, max(start, document.place(menu.range.end)), menu.text)
        extra = tuple(self._documents.beside(document, self.settings))
        return Ask(
            document, document.revision, place, selected, extra, self._documents.project.repository_of(document.uri)
        )

    def _item(self, answer: Answer, ask: Ask, params: types.InlineCompletionParams) -> types.InlineCompletionItem:
        menu = params.context.selected_completion_info
        lead = "" if menu is None else menu.text
        where = types.Range(params.position, params.position) if menu is None else menu.range
        self._outcomes.given(answer.suggestion_id, lead + answer.text, len(lead))
        command = types.Command("Accept", ACCEPT_COMMAND, arguments=[answer.suggestion_id])
        return types.InlineCompletionItem(insert_text=lead + answer.text, range=where, command=command)
