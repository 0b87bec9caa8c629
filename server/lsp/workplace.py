"""All that one editor has with us: its documents, its settings, its completions."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from lsprotocol import types

from server.lsp.completer import Completer
from server.lsp.document_table import DocumentTable
from server.lsp.notices import Notices, State
from server.lsp.outcomes import Outcomes
from server.lsp.plain_values import plain
from server.lsp.position_encoding import PositionEncoding
from server.lsp.project import Project, folders_of
from server.lsp.session_link import SessionLink
from server.lsp.settings import read_settings
from specdec.client.client import Client


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
            self._notices.state(State.OFF)
            self.link.stop()
        else:
            self.link.start()
