"""Keeps an editor's completion session with its server, through restarts and outages."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

import grpc

from server.lsp.answer import Answer
from server.lsp.ask import Ask
from server.lsp.live_session import LiveSession
from server.lsp.notices import Notices, State
from server.lsp.open_document import OpenDocument
from server.lsp.reconnect import Reconnect
from server.lsp.settings import Settings
from specdec.api.v1 import completion_pb2 as pb
from specdec.client.call_error import CallError
from specdec.client.client import Client
from specdec.client.completion_client import Outcome

GRACE_S = 0.4  # after a cancelled ask, until it is certain that no other follows that may go on with its text
SILENT_S = 15.0  # beyond an ask's own limit; who has not answered by then never will
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

    async def ask(self, ask: Ask) -> Answer | None:
        """The suggestion; None where there is none to be had now. When the caller is cancelled, the server goes on for
        a moment: what is typed next may be what it is saying."""
        live = self._live if self._ready else None
        if live is None:
            if self._trouble:
                self._notices.tell("server", self._trouble)
            return None
        ask_id, answer = live.ask(ask)
        limit = self._settings.time_limit_ms
        try:
            done, _ = await asyncio.wait([answer], timeout=SILENT_S + (_NO_LIMIT_S if limit is None else limit / 1e3))
        except asyncio.CancelledError:
            asyncio.get_running_loop().call_later(GRACE_S, live.cancel, ask_id)
            raise
        if not done:
            live.cancel(ask_id)
            self.reconnect()
            return None
        return answer.result()

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
            self._notices.state(State.AWAY, self._trouble)
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
        self._notices.state(State.READY, "" if ready.fills_in else "continues the text before the cursor", ready.model)
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
