"""An editor's completion session with its server: what is asked and answered, kept through restarts and outages."""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

import grpc

from server.completion.documents import MAX_CHARACTERS, TextDocument
from server.lsp.documents import OpenDocument, Settings
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.client.client import Client, Outcome, SessionCall
from specdec.client.connection import CallError


@dataclass(frozen=True, slots=True)
class SuggestionRequest:
    """At index ``place`` of ``document`` as of ``revision``. ``selected``: what the editor's menu would put into the
    place of what lies between two indices; the completion is to follow that. ``extra``: other texts of the project."""

    document: OpenDocument
    revision: int
    place: int
    selected: tuple[int, int, str] | None = None
    extra: tuple[options_pb2.ContextFile, ...] = ()
    repository: str = ""

    @property
    def by_cursor(self) -> bool:
        """Whether a place in the document says it all, so that the server's copy of it can be used."""
        return self.selected is None and len(self.document.text) <= MAX_CHARACTERS

    def gap(self) -> options_pb2.FimPrompt:
        """The texts around the place, cut as the server cuts its copy: a generation goes on from one to the other."""
        text, place = self.document.text, self.place
        if self.selected is not None:
            start, end, menu = self.selected
            text, place = text[:start] + menu + text[end:], start + len(menu)
        prefix, suffix = TextDocument(text, 0).around(place)
        return options_pb2.FimPrompt(
            prefix=prefix, suffix=suffix, file_name=self.document.name, language=self.document.language,
            extra=self.extra, repo_name=self.repository,
        )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Answer:
    """A suggestion that was made to its end. ``suggestion_id``: to be named when its outcome is told."""

    suggestion_id: str
    text: str


_FILL = {
    "middle": pb.CompletionOptions.MODE_MIDDLE,
    "middle_or_prefix": pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX,
    "prefix": pb.CompletionOptions.MODE_PREFIX,
}
_SPECULATION = {
    "auto": options_pb2.SpeculationOptions.MODE_AUTO,
    "on": options_pb2.SpeculationOptions.MODE_ON,
    "off": options_pb2.SpeculationOptions.MODE_OFF,
}


def setup_message(settings: Settings, session_id: str) -> pb.CompleteSessionRequest:
    """The message that sets up a session, or changes it. ``session_id`` empty: the server chooses one."""
    setup = pb.SessionSetup(
        model=settings.model,
        completion=pb.CompletionOptions(mode=_FILL[settings.fill], max_prompt_tokens=settings.max_prompt_tokens),
        stopping=options_pb2.StoppingOptions(
            max_tokens=settings.max_tokens, max_lines=settings.max_lines, time_limit_ms=settings.time_limit_ms,
            finish_line=True,
        ),
        speculation=options_pb2.SpeculationOptions(
            mode=_SPECULATION[settings.speculation], indexes=settings.indexes
        ),
        unit=pb.OFFSET_UNIT_CODE_POINT,
    )  # fmt: skip
    setup.session.id, setup.cache.salt = session_id, settings.cache_salt
    return pb.CompleteSessionRequest(setup=setup)


Show = Callable[[str], None]


class LinkState(StrEnum):
    """What there is to show in a status bar."""

    CONNECTING = "connecting"
    READY = "ready"
    AWAY = "away"
    OFF = "off"


class Notices:
    """Each thing is said once, until it is `over`. ``show`` puts a line before the user's eyes, ``status`` shows a
    state, a line about it, and the model's name, without asking for attention."""

    def __init__(self, show: Show, status: Callable[[LinkState, str, str], None]) -> None:
        self._show, self._status = show, status
        self._said: dict[str, str] = {}
        self._last: tuple[LinkState, str, str] | None = None

    def tell(self, subject: str, text: str) -> None:
        """Say ``text``, unless something was said about ``subject`` that is not over."""
        if subject not in self._said:
            self._said[subject] = text
            self._show(text)

    def over(self, subject: str) -> None:
        """What is said about ``subject`` from now on is news."""
        self._said.pop(subject, None)

    def state(self, state: LinkState, text: str = "", model: str = "") -> None:
        """What is so now."""
        if self._last != (state, text, model):
            self._last = (state, text, model)
            self._status(state, text, model)


@dataclass(frozen=True, slots=True)
class Reconnect:
    """The pause is ``first_s`` seconds and doubles with each failure up to ``longest_s``. ``lasting_s``: where the
    server is there and refuses, which a setting has to change."""

    first_s: float = 0.25
    longest_s: float = 4.0
    lasting_s: float = 30.0

    def pause_s(self, failures: int, *, lasting: bool) -> float:
        """Seconds until the next try, after so many failures in a row."""
        if lasting:
            return self.lasting_s
        return min(self.longest_s, self.first_s * 2.0 ** min(failures, 30))


_LAST_WORD = re.compile(r"[ \t]*\w*\Z")
_UNSENT = 64  # messages that may wait for a server that does not read
_CUT = (result_pb2.FINISH_REASON_SUPERSEDED, result_pb2.FINISH_REASON_ABORTED)


class _Asked:
    """An ask without its last word."""

    def __init__(self, ask_id: int, ask: SuggestionRequest) -> None:
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

    ``heard``: messages of the server. ``on_ready`` is told once that the server has set up the session, ``on_refused``
    of asks that it does not serve.
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
        self._asks = self.heard = 0
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

    def ask(self, ask: SuggestionRequest) -> tuple[int, asyncio.Future[Answer | None]]:
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

    def so_far(self, ask_id: int) -> Answer | None:
        """What was said to an ask whose last word is still to come, without the word that is not whole yet; None where
        there is nothing of it."""
        asked = self._asked
        if asked is None or asked.ask_id != ask_id:
            return None
        text = _LAST_WORD.sub("", asked.text)
        return Answer(asked.suggestion_id, text) if text else None

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
        self.heard += 1
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


GRACE_S = 0.4  # after a cancelled ask, until it is certain that no other follows that may go on with its text
SILENT_S = 15.0  # beyond an ask's own limit; who has said nothing by then never will
_NO_LIMIT_S = 60.0
# Trying again changes nothing about these: somebody has to change a setting.
_LASTING = (
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
)  # fmt: skip


class SessionLink:
    """``connect`` makes a client; one is used for as long as its stream lives. The session's id stays, so that a
    server that is still there gives back the documents it holds. `start` it, and `close` it, in one event loop."""

    def __init__(
        self, connect: Callable[[], Client], settings: Settings, notices: Notices, pauses: Reconnect | None = None
    ) -> None:
        self._connect, self._settings, self._notices = connect, settings, notices
        self._pauses = pauses or Reconnect()
        self._client: Client | None = None
        self._live: LiveSession | None = None
        self._ready = False
        self._session_id = ""
        self._trouble = ""
        self._poked = asyncio.Event()
        self._keeping: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None  # what `stop` has stopped
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, and stay so."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(self._ending), name="lsp-session-link")

    def stop(self) -> None:
        """End the session; it may be started again."""
        if self._keeping is not None:
            self._ending, self._keeping, self._trouble = self._keeping, None, ""
            self._ending.cancel()

    async def close(self) -> None:
        """End the session, and wait until it has ended."""
        self.stop()
        if self._ending is not None:
            await asyncio.wait([self._ending])

    def configure(self, settings: Settings) -> None:
        """Options of every ask from now on. Another cache salt or model is another session."""
        former, self._settings = self._settings, settings
        if (former.cache_salt, former.model) != (settings.cache_salt, settings.model):
            self._session_id = ""
            self.reconnect()
        elif self._live is not None and former != settings:
            self._live.configure(settings, self._session_id)
        self._poked.set()

    def reconnect(self) -> None:
        """Give up the stream, and open another one."""
        if self._serving is not None:
            self._serving.cancel()
        self._poked.set()

    def forget(self, document: OpenDocument) -> None:
        """A document was closed."""
        if self._live is not None:
            self._live.forget(document)

    async def ask(self, ask: SuggestionRequest) -> Answer | None:
        """The suggestion; None where there is none to be had now. When the caller is cancelled, the server goes on for
        a moment: what is typed next may be what it is saying."""
        live = self._live if self._ready else None
        if live is None:
            if self._trouble:
                self._notices.tell("server", self._trouble)
            return None
        ask_id, answer = live.ask(ask)
        limit, later = self._settings.time_limit_ms, asyncio.get_running_loop().call_later
        try:
            done, _ = await asyncio.wait([answer], timeout=SILENT_S + _NO_LIMIT_S if limit is None else limit / 1e3)
        except asyncio.CancelledError:
            later(GRACE_S, live.cancel, ask_id)
            raise
        if done:
            return answer.result()
        if limit is None:
            live.cancel(ask_id)
            self.reconnect()
            return None
        later(GRACE_S, live.cancel, ask_id)
        later(SILENT_S, self._reconnect_if_silent, live, live.heard)
        return live.so_far(ask_id)

    def _reconnect_if_silent(self, live: LiveSession, heard: int) -> None:
        """A server that is there ends every ask with a message."""
        if self._live is live and live.heard == heard:
            self.reconnect()

    async def report(self, suggestion_id: str, outcome: Outcome, accepted_characters: int, shown_ms: float) -> None:
        """Tell the server what became of a suggestion; where none is there, nobody wants to know."""
        if self._client is None:
            return
        try:
            await self._client.completion.report_outcome(
                suggestion_id, outcome, accepted_characters=accepted_characters, shown_ms=shown_ms,
                cache_salt=self._settings.cache_salt,
            )  # fmt: skip
        except CallError:
            pass
        except asyncio.CancelledError:
            # gRPC says so too where the connection is closed under the call.
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise

    async def _keep(self, former: asyncio.Task[None] | None) -> None:
        if former is not None:
            await asyncio.wait([former])
        failures = 0
        while True:
            self._poked.clear()
            self._serving = asyncio.create_task(self._serve(), name="lsp-session")
            error: CallError | None = None
            try:
                await asyncio.wait([self._serving])
                if not self._serving.cancelled():
                    found = self._serving.exception()
                    if found is not None and not isinstance(found, CallError):
                        raise found
                    error = found
            finally:
                self._serving.cancel()
                await asyncio.wait([self._serving])
                was_ready, self._ready, self._live, self._client = self._ready, False, None, None
            failures = 0 if was_ready else failures + 1
            self._trouble = str(error) if error is not None else "the specdec server has ended the session"
            self._notices.state(LinkState.AWAY, self._trouble)
            lasting = error is not None and error.reached and error.code in _LASTING
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._poked.wait(), self._pauses.pause_s(failures, lasting=lasting))

    async def _serve(self) -> None:
        async with self._connect() as client, client.completion.session() as call:
            self._client = client
            self._live = LiveSession(call, self._set_up, self._refused)
            await self._live.run(self._settings, self._session_id)

    def _set_up(self, ready: pb.SessionReady) -> None:
        self._session_id, self._ready, self._trouble = ready.session_id, True, ""
        self._notices.over("server")
        self._notices.over("refused")
        self._notices.state(
            LinkState.READY, "" if ready.fills_in else "continues the text before the cursor", ready.model
        )
        if not ready.fills_in:
            self._notices.tell(
                f"fill:{ready.model}",
                f"the model {ready.model} was not trained to fill in: suggestions only continue what stands in front "
                "of the cursor; a code model that knows fill-in-the-middle does better",
            )

    def _refused(self, refused: pb.AskRefused) -> None:
        # A server that is busy will not be for long, and the next key asks again.
        if not refused.HasField("retry_after_ms"):
            told = "; ".join(f"{p.field}: {p.description}" for p in refused.problems) or refused.message
            self._notices.tell("refused", f"the specdec server refuses to complete: {told}")
