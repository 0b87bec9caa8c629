"""One completion session with a server, while its stream is open."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from server.lsp.answer import Answer
from server.lsp.ask import Ask
from server.lsp.open_document import OpenDocument
from server.lsp.settings import Settings
from server.lsp.setup import setup_message
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import result_pb2
from specdec.client.call_error import CallError
from specdec.client.session_call import SessionCall

_UNSENT = 64  # messages that may wait for a server that does not read
_CUT = (result_pb2.FINISH_REASON_SUPERSEDED, result_pb2.FINISH_REASON_ABORTED)


class _Asked:
    """An ask without its last word."""

    def __init__(self, ask_id: int, ask: Ask) -> None:
        self.ask_id, self.ask = ask_id, ask
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.suggestion_id, self.text = "", ""
        self.again = False

    def end(self, answer: Answer | None) -> None:
        """Tell who waits; only the first word counts."""
        if not self.answer.done():
            self.answer.set_result(answer)


class LiveSession:
    """One ask at a time: a new one supersedes the one before, whose answer is None then. A document travels when a
    completion is asked for in it: as a whole at first, then as what changed since, in one message with the ask.

    ``on_ready`` is told once that the server has set up the session, ``on_refused`` of asks that it does not serve.
    """

    def __init__(
        self,
        call: SessionCall,
        on_ready: Callable[[pb.SessionReady], None],
        on_refused: Callable[[pb.AskRefused], None],
    ) -> None:
        self._call, self._on_ready, self._on_refused = call, on_ready, on_refused
        self._unsent: asyncio.Queue[pb.CompleteSessionRequest] = asyncio.Queue()
        self._held: dict[str, int] = {}
        self._asked: _Asked | None = None
        self._asks = 0
        self._ready = False

    async def run(self, settings: Settings, session_id: str) -> None:
        """Set up the session and serve it until the stream ends.

        Raises:
            CallError: it ends with an error.
        """
        self.configure(settings, session_id)
        writing = asyncio.create_task(self._write(), name="lsp-session-writer")
        try:
            async for message in self._call:
                self._take(message)
        finally:
            writing.cancel()
            await asyncio.wait([writing])
            self._supersede(None)

    def configure(self, settings: Settings, session_id: str) -> None:
        """Options of every ask from now on."""
        self._unsent.put_nowait(setup_message(settings, session_id))

    def forget(self, document: OpenDocument) -> None:
        """The server need not hold a document any more."""
        if self._held.pop(document.name, None) is not None:
            self._unsent.put_nowait(pb.CompleteSessionRequest(close=document.name))

    def ask(self, ask: Ask) -> tuple[int, asyncio.Future[Answer | None]]:
        """The ask's number, and what will be its answer: None where it is superseded, cancelled or refused, or where
        the stream ends."""
        self._asks += 1
        asked = _Asked(self._asks, ask)
        if self._unsent.qsize() >= _UNSENT:
            asked.end(None)
        else:
            self._supersede(asked)
            self._send(asked)
        return asked.ask_id, asked.answer

    def cancel(self, ask_id: int) -> None:
        """End an ask, unless it was answered or superseded."""
        if self._asked is not None and self._asked.ask_id == ask_id:
            self._supersede(None)
            self._unsent.put_nowait(pb.CompleteSessionRequest(cancel=True))

    def _supersede(self, by: _Asked | None) -> None:
        if self._asked is not None:
            self._asked.end(None)
        self._asked = by

    def _send(self, asked: _Asked) -> None:
        ask, document = asked.ask, asked.ask.document
        message = pb.CompleteSessionRequest()
        message.ask.id = asked.ask_id
        if ask.by_cursor:
            self._bring_up_to_date(document, message)
            message.ask.cursor.CopyFrom(pb.Cursor(uri=document.name, version=document.revision, offset=ask.place))
            message.ask.extra.extend(ask.extra)
            message.ask.repo_name = ask.repository
        else:
            message.ask.fim.CopyFrom(ask.gap())
        self._unsent.put_nowait(message)

    def _bring_up_to_date(self, document: OpenDocument, message: pb.CompleteSessionRequest) -> None:
        held = self._held.get(document.name)
        edits = document.edits_since(held)
        if held is None or edits is None:
            message.text.CopyFrom(
                pb.DocumentText(
                    uri=document.name, version=document.revision, text=document.text, language=document.language
                )
            )
        elif edits:
            message.edits.CopyFrom(
                pb.DocumentEdits(uri=document.name, from_version=held, version=document.revision, edits=edits)
            )
        self._held[document.name] = document.revision

    async def _write(self) -> None:
        # What is wrong with the stream, its reader is told.
        with contextlib.suppress(CallError, asyncio.InvalidStateError):
            while True:
                await self._call.send(await self._unsent.get())

    def _take(self, message: pb.CompleteSessionResponse) -> None:
        which = message.WhichOneof("event")
        if which == "ready":
            if not self._ready:
                self._ready = True
                self._held = dict(message.ready.documents)
                self._on_ready(message.ready)
            return
        asked, ask_id = self._asked, 0 if which is None else getattr(message, which).ask_id
        if which == "resync":
            self._held.pop(message.resync.uri, None)
        if asked is None or asked.ask_id != ask_id:
            return
        if which == "started":
            asked.suggestion_id = message.started.suggestion_id
        elif which == "delta":
            asked.text += message.delta.text
        elif which == "finished":
            cut = message.finished.finish_reason in _CUT
            asked.end(None if cut else Answer(asked.suggestion_id, asked.text))
            self._asked = None
        elif which == "refused":
            self._supersede(None)
            self._on_refused(message.refused)
        elif which == "resync":
            self._ask_again(asked)

    def _ask_again(self, asked: _Asked) -> None:
        # The document may have changed since, and the place with it; then a newer ask is on its way, or none is wanted.
        if asked.again or asked.ask.document.revision != asked.ask.revision:
            self._supersede(None)
        else:
            asked.again = True
            self._send(asked)
