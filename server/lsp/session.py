"""An editor's completion session with its server, kept through restarts and outages."""

from __future__ import annotations

import asyncio
import contextlib
import re
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum

import grpc

from server.completion.documents import MAX_CHARACTERS, TextDocument
from server.lsp.documents import OpenDocument, Settings
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2, result_pb2
from specdec.client.client import Client, Outcome, SessionCall
from specdec.client.connection import CallError
from specdec.core.types import Delta
from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class SuggestionRequest:
    """A request for a suggestion at one place of a document."""

    document: OpenDocument
    revision: int  # of the document
    place: int  # index of the cursor
    selected: tuple[int, int, str] | None = None  # the editor's menu would replace [start, end) with this text
    extra: tuple[options_pb2.ContextFile, ...] = ()  # excerpts of other documents
    repository: str = ""  # name of the project
    read_ahead: bool = False  # suggest nothing, only compute the prompts

    @property
    def by_cursor(self) -> bool:
        """Whether the cursor's position suffices, so that the server's copy of the document can be used."""
        return self.selected is None and len(self.document.text) <= MAX_CHARACTERS

    def gap(self) -> options_pb2.FimPrompt:
        """The texts around the place, cut as the server cuts its copy, so that the two ways share a prefix."""
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
    suggestion_id: str  # for the report of its outcome
    text: str


def setup_of(settings: Settings, session_id: str) -> pb.SessionSetup:
    """What sets up a session, or changes it. ``session_id`` empty: the server chooses one."""
    fill = pb.CompletionOptions.Mode.Value(f"MODE_{settings.fill.upper()}")
    speculation = options_pb2.SpeculationOptions.Mode.Value(f"MODE_{settings.speculation.upper()}")
    setup = pb.SessionSetup(
        model=settings.model,
        completion=pb.CompletionOptions(
            mode=fill, max_prompt_tokens=settings.max_prompt_tokens, ttft_ms=settings.ttft_ms or None
        ),
        stopping=options_pb2.StoppingOptions(
            max_tokens=settings.max_tokens, max_lines=settings.max_lines, time_limit_ms=settings.time_limit_ms,
            finish_line=settings.time_limit_ms is not None,
        ),
        speculation=options_pb2.SpeculationOptions(mode=speculation, indexes=settings.indexes),
        unit=pb.OFFSET_UNIT_CODE_POINT,
    )  # fmt: skip
    setup.session.id, setup.cache.salt = session_id, settings.cache_salt
    return setup


class LinkState(StrEnum):
    READY = "ready"
    BUSY = "busy"  # ready, and a request runs
    AWAY = "away"
    OFF = "off"


class Notices:
    """Messages to the user. ``show`` displays a warning. ``status`` gets the state of the connection when it changes,
    for a status bar: ``state``, ``message``, the session's ``model``, and ``nextEdits``, why no edits are predicted."""

    def __init__(self, show: Callable[[str], None], status: Callable[[dict[str, str]], None]) -> None:
        self._show, self._status = show, status
        self._said: set[str] = set()  # subjects
        self._now = dict[str, str]()  # empty: there is none yet
        self._last = dict[str, str]()
        self._no_edits, self._running = "", 0

    def warn(self, subject: str, text: str) -> None:
        """Show ``text``, unless a warning about ``subject`` was shown and is not over."""
        if subject not in self._said:
            self._said.add(subject)
            self._show(text)

    def over(self, subject: str) -> None:
        """The next warning about ``subject`` is shown again."""
        self._said.discard(subject)

    def state(self, state: LinkState, text: str = "", model: str = "") -> None:
        self._now = {"state": state, "message": text, "model": model}
        self._publish()

    def edits(self, trouble: str) -> None:
        """Why no edits are predicted; empty: they are."""
        self._no_edits = trouble
        self._publish()

    @contextlib.contextmanager
    def busy(self) -> Iterator[None]:
        """A request runs in the block."""
        self._running += 1
        self._publish()
        try:
            yield
        finally:
            self._running -= 1
            self._publish()

    def _publish(self) -> None:
        if not self._now:
            return
        status = self._now | {"nextEdits": self._no_edits}
        if self._running and status["state"] == LinkState.READY:
            status["state"] = LinkState.BUSY
        if self._last != status:
            self._last = status
            self._status(status)


_LAST_WORD = re.compile(r"\s*\w*\Z")
_CUT = (result_pb2.FINISH_REASON_SUPERSEDED, result_pb2.FINISH_REASON_ABORTED)


class Ask:
    """A request of a session, and its answer: None if it is superseded, cancelled or refused, or the stream ends."""

    def __init__(self, ask_id: int, request: SuggestionRequest) -> None:
        self.ask_id, self.request = ask_id, request
        self.begun = asyncio.Event()  # its text has begun
        self.answer: asyncio.Future[Answer | None] = asyncio.get_running_loop().create_future()
        self.suggestion_id, self.text = "", ""
        self.resent = False

    @property
    def so_far(self) -> Answer | None:
        """The text received until now, without its last, incomplete word; None if there is none."""
        text = _LAST_WORD.sub("", self.text)
        return Answer(self.suggestion_id, text) if text else None

    def end(self, answer: Answer | None) -> None:
        """Set the answer; only the first call counts."""
        if not self.answer.done():
            self.answer.set_result(answer)


class LiveSession:
    """Completes one request at a time: a new one supersedes the previous one, whose answer is then None. A document is
    sent when a completion is requested in it: completely at first, then as edits, in one message with the request.

    on_ready: called when the server has set up the session. on_refused: called when it refuses a request.
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
        self._pending: Ask | None = None
        self._requests = 0
        self.heard = 0  # messages from the server
        self.ready = False  # whether the server has set up the session

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
        """Set the options of later requests."""
        self._unsent.put_nowait(pb.CompleteSessionRequest(setup=setup_of(settings, session_id)))

    def forget(self, document: OpenDocument) -> None:
        if self._held.pop(document.name, None) is not None:
            self._unsent.put_nowait(pb.CompleteSessionRequest(close=document.name))

    def complete(self, request: SuggestionRequest) -> Ask:
        """Send a request."""
        self._requests += 1
        pending = Ask(self._requests, request)
        self._supersede(pending)
        self._send(pending)
        return pending

    async def idle(self) -> None:
        """Wait until no request runs."""
        while self._pending is not None:
            await asyncio.wait([self._pending.answer])

    def cancel(self, ask: Ask) -> None:
        """Cancel a request, unless it was answered or superseded."""
        if self._pending is ask:
            self._supersede(None)
            self._unsent.put_nowait(pb.CompleteSessionRequest(cancel=True))

    def _supersede(self, by: Ask | None) -> None:
        if self._pending is not None:
            self._pending.end(None)
        self._pending = by

    def _send(self, pending: Ask) -> None:
        request, document = pending.request, pending.request.document
        message = pb.CompleteSessionRequest()
        message.ask.id, message.ask.read_ahead = pending.ask_id, request.read_ahead
        if request.by_cursor:
            self._bring_up_to_date(document, message)
            message.ask.cursor.CopyFrom(pb.Cursor(uri=document.name, version=document.revision, offset=request.place))
            message.ask.extra.extend(request.extra)
            message.ask.repo_name = request.repository
        else:
            message.ask.fim.CopyFrom(request.gap())
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
        # The stream's reader gets its error.
        with contextlib.suppress(CallError, asyncio.InvalidStateError):
            while True:
                await self._call.send(await self._unsent.get())

    def _take(self, message: pb.CompleteSessionResponse) -> None:
        self.heard += 1
        which = message.WhichOneof("event")
        if which == "ready":
            if not self.ready:
                self.ready = True
                self._held = dict(message.ready.documents)
                self._on_ready(message.ready)
            return
        pending, ask_id = self._pending, 0 if which is None else getattr(message, which).ask_id
        if which == "resync":
            self._held.pop(message.resync.uri, None)
        if pending is None or pending.ask_id != ask_id:
            return
        if which == "started":
            pending.suggestion_id = message.started.suggestion_id
        elif which == "delta":
            pending.begun.set()
            pending.text += message.delta.text
        elif which == "finished":
            reason = message.finished.finish_reason
            # A token limit may end a text in the middle of the next line's indentation.
            text = pending.text.rstrip() if reason == result_pb2.FINISH_REASON_LENGTH else pending.text
            pending.end(None if reason in _CUT else Answer(pending.suggestion_id, text))
            self._pending = None
        elif which == "refused":
            self._supersede(None)
            self._on_refused(message.refused)
        elif which == "resync":
            self._resend(pending)

    def _resend(self, pending: Ask) -> None:
        # If the document has changed, the place is stale; the editor sends a newer request if it wants one.
        if pending.resent or pending.request.document.revision != pending.request.revision:
            self._supersede(None)
        else:
            pending.resent = True
            self._send(pending)


ALTERNATIVES_TEMPERATURE = 0.8
GRACE_S = 0.4  # between the cancellation of a request and its abort: the next request may continue its text
SILENT_S = 15.0  # beyond a request's time limit, after which a silent server counts as dead
NO_LIMIT_S = 60.0  # time limit if the settings have none
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.25, 4.0  # between attempts to connect; doubles until a session is set up
_LASTING_PAUSE_S = 30.0  # if the server refuses the session
# Errors that only a changed setting can resolve.
_LASTING = (
    grpc.StatusCode.UNAUTHENTICATED, grpc.StatusCode.PERMISSION_DENIED, grpc.StatusCode.UNIMPLEMENTED,
    grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND, grpc.StatusCode.FAILED_PRECONDITION,
)  # fmt: skip


class SessionLink:
    """Keeps a session open. ``connect`` creates a client, used for one stream, by the number of streams that failed so
    far. The session's id is kept, so that a server that still runs returns the versions of the documents it holds.
    `start` it, and `close` it, in one event loop."""

    def __init__(self, connect: Callable[[int], Client], settings: Settings, notices: Notices) -> None:
        self._connect, self._notices = connect, notices
        self.settings = settings  # in force; `configure` changes them
        self._client: Client | None = None
        self._live: LiveSession | None = None
        self._failures, self._pause_s = 0, _FIRST_PAUSE_S  # streams that failed, and the pause after the next one
        self.model = ""  # of the session; empty before it is set up
        self._session_id = ""
        self._trouble = ""
        self._configured = asyncio.Event()  # since `_keep` looked at the settings
        self._keeping: asyncio.Task[None] | None = None
        self._serving: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Connect, and reconnect after failures, while the settings allow it."""
        if self._keeping is None:
            self._keeping = asyncio.create_task(self._keep(), name="lsp-session-link")

    async def close(self) -> None:
        """End the session, and wait for its end."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait([self._keeping])

    def configure(self, settings: Settings) -> None:
        """Set the options of later requests. Another cache salt or model starts a new session; mode off ends it."""
        former, self.settings = self.settings, settings
        is_another = (former.cache_salt, former.model) != (settings.cache_salt, settings.model)
        if is_another:
            self._session_id = ""
        if is_another or settings.mode == "off":
            self._end_stream("")
        elif self._live is not None and former != settings:
            self._live.configure(settings, self._session_id)
        self._configured.set()

    def _end_stream(self, trouble: str) -> None:
        """End the stream; `_keep` sets up another. Until then ``trouble`` is reported."""
        self._trouble = trouble
        if self._serving is not None:
            self._serving.cancel()

    @property
    def client(self) -> Client | None:
        """The client of the session; None while there is none."""
        return None if self._ready is None else self._client

    @property
    def _ready(self) -> LiveSession | None:
        return self._live if self._live is not None and self._live.ready else None

    def forget(self, document: OpenDocument) -> None:
        if self._live is not None:
            self._live.forget(document)

    async def complete(self, request: SuggestionRequest, choices: int = 1) -> list[Answer]:
        """The suggestion, and ``choices`` - 1 sampled texts for the same place, which may be empty; none at all if
        there is no suggestion now. At the time limit unfinished texts end without their last word. If the caller is
        cancelled, the server continues for `GRACE_S`: the next key may continue its text."""
        live = self._ready
        if live is None:
            if self._trouble:
                self._notices.warn("server", self._trouble)
            return []
        limit, loop = self.settings.time_limit_ms, asyncio.get_running_loop()
        limit_s = NO_LIMIT_S if limit is None else limit / 1e3
        ask = live.complete(request)
        ends_s = loop.time() + limit_s
        sampling = [asyncio.create_task(self._sampled(ask, ends_s)) for _ in range(choices - 1)]
        try:
            with self._notices.busy():
                done, _ = await asyncio.wait([ask.answer], timeout=limit_s)
            if not done:
                loop.call_later(GRACE_S, live.cancel, ask)
                loop.call_later(SILENT_S, self._reconnect_if_silent, live, live.heard)
            answer = ask.answer.result() if done else ask.so_far
            return [answer, *[await task for task in sampling]] if answer is not None and answer.text else []
        except asyncio.CancelledError:
            loop.call_later(GRACE_S, live.cancel, ask)
            raise
        finally:
            for task in sampling:
                task.cancel()

    async def read_ahead(self, request: SuggestionRequest) -> None:
        """Let the server compute the prompts of a place once nothing else is requested; cancel it to stop."""
        if self._live is not None:
            await self._live.idle()  # a request that met its limit runs for `GRACE_S` more
        live = self._ready
        if live is None:
            return
        ask = live.complete(request)
        try:
            await ask.answer
        finally:
            live.cancel(ask)

    async def _sampled(self, ask: Ask, ends_s: float) -> Answer:
        """Another text for the place of ``ask``, requested once the text of that has begun: its prompt is then in the
        server's prefix cache. ``ends_s``: when the time limit ends, in seconds of the loop's clock."""
        request_id, text = uuid.uuid4().hex, ""
        try:
            async with asyncio.timeout_at(ends_s):
                await ask.begun.wait()
                if (client := self._client) is not None:
                    setup = setup_of(self.settings, self._session_id)
                    message = pb.CompleteRequest(
                        request_id=request_id, model=setup.model, fim=ask.request.gap(), completion=setup.completion,
                        sampling=options_pb2.SamplingOptions(temperature=ALTERNATIVES_TEMPERATURE),
                        stopping=setup.stopping, speculation=setup.speculation, cache=setup.cache,
                        session=setup.session,
                    )  # fmt: skip
                    async for event in client.completion.stream(message):
                        text += event.text if isinstance(event, Delta) else ""
        except CallError:
            pass  # the text before the error is offered
        except TimeoutError:
            text = _LAST_WORD.sub("", text)
        return Answer(request_id, text)

    def _reconnect_if_silent(self, live: LiveSession, heard: int) -> None:
        """A live server ends every request with a message."""
        if self._live is live and live.heard == heard:
            self._end_stream("the specdec server does not answer; connecting again")

    async def report(self, suggestion_id: str, outcome: Outcome) -> None:
        """Report the outcome of a suggestion; dropped without a connection."""
        if self._client is None:
            return
        with contextlib.suppress(CallError):  # only statistics are lost
            await self._client.completion.report_outcome(suggestion_id, outcome, cache_salt=self.settings.cache_salt)

    async def _keep(self) -> None:
        while True:
            self._configured.clear()
            if self.settings.mode == "off":
                self._notices.state(LinkState.OFF)
                await self._configured.wait()
                continue
            serving = self._serving = asyncio.create_task(self._serve(), name="lsp-session")
            try:
                await asyncio.wait([serving])
            finally:
                serving.cancel()
                await asyncio.wait([serving])
            if serving.cancelled():  # by `_end_stream`
                if self._trouble:
                    self._failures += 1
                    self._notices.state(LinkState.AWAY, self._trouble)
                continue
            self._failures += 1
            error = serving.exception()
            if error is not None and not isinstance(error, SpecdecError):
                raise error
            self._trouble = str(error or "the specdec server ended the session")
            self._notices.state(LinkState.AWAY, self._trouble)
            lasting = isinstance(error, CallError) and error.reached and error.code in _LASTING
            pause_s = _LASTING_PAUSE_S if lasting else self._pause_s
            self._pause_s = min(2 * self._pause_s, _LONGEST_PAUSE_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause_s):  # unlike `wait_for`, it drops no cancellation
                    await self._configured.wait()

    async def _serve(self) -> None:
        async with self._connect(self._failures) as client, client.completion.session() as call:
            live = LiveSession(call, self._set_up, self._refused)
            self._client, self._live = client, live
            try:
                await live.run(self.settings, self._session_id)
            finally:
                self._live = self._client = None

    def _set_up(self, ready: pb.SessionReady) -> None:
        self._session_id, self.model, self._trouble = ready.session_id, ready.model, ""
        self._pause_s = _FIRST_PAUSE_S
        self._notices.over("server")
        self._notices.over("refused")
        self._notices.state(
            LinkState.READY, "" if ready.fills_in else "continues the text before the cursor", ready.model
        )
        if not ready.fills_in:
            self._notices.warn(
                f"fill:{ready.model}",
                f"the model {ready.model} has no fill-in-the-middle: suggestions only continue the text before the "
                "cursor; use a code model with fill-in-the-middle for better ones",
            )

    def _refused(self, refused: pb.AskRefused) -> None:
        # A busy server needs no warning: the next key sends a new request.
        if not refused.HasField("retry_after_ms"):
            reason = "; ".join(f"{p.field}: {p.description}" for p in refused.problems) or refused.message
            self._notices.warn("refused", f"the specdec server refuses to complete: {reason}")
