"""The language server over standard input and output: LSP's messages."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from functools import partial
from typing import Any, BinaryIO

from cattrs import ClassValidationError, transform_error
from lsprotocol import converters, types
from pygls.exceptions import JsonRpcException, JsonRpcInvalidParams, JsonRpcInvalidRequest
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

import specdec
from server.completion.documents import OffsetUnit
from server.lsp.completer import ACCEPT_COMMAND, Workplace
from server.lsp.session import Notices
from specdec.client.client import Client

_LOG = logging.getLogger(__name__)

_Handled = Generator[Any, Any, None]
_UNITS = {"utf-8": OffsetUnit.UTF8, "utf-16": OffsetUnit.UTF16, "utf-32": OffsetUnit.CODE_POINT}  # by LSP's names


class InlineProtocol(LanguageServerProtocol):
    """Disables pygls's own copy of the documents: it would apply each change twice, and it splits lines at characters
    that are not line ends in LSP. Answers requests with invalid parameters, which pygls drops."""

    def structure_message(self, data: dict[str, Any]) -> Any:
        """As pygls's; the error of a request is also its answer."""
        try:
            if self._shutdown and {"id", "method"} <= data.keys():
                raise JsonRpcInvalidRequest("the server is shut down; send `exit`, and start another")
            return super().structure_message(data)
        except JsonRpcException as error:
            if "id" in data and "method" in data:
                cause = error.__cause__
                text = "; ".join(transform_error(cause)) if isinstance(cause, ClassValidationError) else error.message
                self._send_response(data["id"], error=types.ResponseError(error.code, text))
            raise

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> _Handled:
        yield self.fm.features[types.TEXT_DOCUMENT_DID_OPEN], (params,), None

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> _Handled:
        yield self.fm.features[types.TEXT_DOCUMENT_DID_CHANGE], (params,), None

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> _Handled:
        yield self.fm.features[types.TEXT_DOCUMENT_DID_CLOSE], (params,), None


INLINE_EDIT = "textDocument/copilotInlineEdit"  # Copilot's name, as several clients send it
# The first four are Copilot's names, so that clients written for its language server report outcomes here too.
DID_SHOW = "textDocument/didShowCompletion"
DID_ACCEPT_PART = "textDocument/didPartiallyAcceptCompletion"
DID_ACCEPT = "textDocument/didAcceptCompletion"
DID_FOCUS = "textDocument/didFocus"
DID_DISMISS = "textDocument/didDismissCompletion"
STATUS = "specdec/didChangeStatus"


class InlineLanguageServer(LanguageServer):
    """``connect`` creates a client of the specdec server, as `SessionLink` takes it."""

    def __init__(self, connect: Callable[[int], Client]) -> None:
        # Not pygls's converter, which makes objects of unknown types of dicts.
        converter = converters.get_converter
        super().__init__("specdec", specdec.__version__, protocol_cls=InlineProtocol, converter_factory=converter)
        self.connect = connect
        self.workplace: Workplace | None = None
        self._add_requests()
        self._on(types.INITIALIZED, lambda work, _: work.start())
        self._on(types.WORKSPACE_DID_CHANGE_CONFIGURATION, lambda work, params: work.configure(params.settings))
        self._on(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS, lambda work, params: work.project.change(params.event))
        self._on(types.TEXT_DOCUMENT_DID_OPEN, lambda work, params: work.open_document(params.text_document))
        self._on(types.TEXT_DOCUMENT_DID_CHANGE, lambda work, params: work.change_document(params))
        self._on(types.TEXT_DOCUMENT_DID_CLOSE, lambda work, params: work.close_document(params.text_document.uri))
        self._on(DID_ACCEPT, lambda work, params: work.outcomes.accepted(_suggestion_id(params)))
        self._on(DID_SHOW, lambda work, params: work.outcomes.shown(_suggestion_id(params)))
        self._on(DID_DISMISS, lambda work, params: work.dismissed(_suggestion_id(params)))
        self._on(DID_ACCEPT_PART, _accept_part)
        self._on(DID_FOCUS, lambda work, params: work.focus(params["textDocument"]["uri"]))

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Log the error. pygls would show it to the user, at every key."""
        _LOG.error("%s: %s", getattr(source, "__name__", source), error)

    def notices(self) -> Notices:
        def show(text: str) -> None:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Warning, f"specdec: {text}"))

        return Notices(show, partial(self.protocol.notify, STATUS))

    def _on(self, method: str, handle: Callable[[Workplace, Any], object]) -> None:
        """Register a notification. One that arrives before `initialize` is ignored, as LSP demands."""

        def run(params: Any) -> None:
            if self.workplace is not None:
                handle(self.workplace, params)

        self.feature(method)(run)

    def _add_requests(self) -> None:
        @self.feature(types.INITIALIZE)
        def initialize(params: types.InitializeParams) -> None:
            agreed = self.workspace.position_encoding
            self.workplace = Workplace(params, _UNITS[agreed or "utf-16"], self.connect, self.notices())
            documents = params.capabilities.text_document
            if documents is None or documents.inline_completion is None:
                self.feature(types.TEXT_DOCUMENT_COMPLETION)(list_one)

        async def list_one(params: types.CompletionParams) -> types.CompletionList:
            assert self.workplace is not None  # the feature is added by `initialize`
            return await self.workplace.completer.list_one(params)

        @self.feature(types.SHUTDOWN)
        async def shutdown(params: None) -> None:
            if self.workplace is not None:
                await self.workplace.close()

        @self.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
        async def complete(params: types.InlineCompletionParams) -> list[types.InlineCompletionItem]:
            return [] if self.workplace is None else await self.workplace.completer.complete(params)

        @self.feature(INLINE_EDIT)
        async def next_edit(params: Any) -> dict[str, Any]:
            try:
                where = self.protocol._converter.structure(params, types.TextDocumentPositionParams)
            except ClassValidationError as error:
                raise JsonRpcInvalidParams("; ".join(transform_error(error))) from None
            return {"edits": [] if self.workplace is None else await self.workplace.next_edits(where, params)}

        @self.command(ACCEPT_COMMAND)
        def accept(suggestion_id: str) -> None:
            if self.workplace is not None:
                self.workplace.outcomes.accepted(suggestion_id)


def _suggestion_id(params: Any) -> str:
    """The suggestion that a notification is about; empty if it names none."""
    try:
        return str(params["item"]["command"]["arguments"][0])
    except (KeyError, IndexError, TypeError):
        return ""


def _accept_part(work: Workplace, params: Any) -> None:
    length = params.get("acceptedLength")
    if isinstance(length, int):
        work.outcomes.partly_accepted(_suggestion_id(params), length)


def run_stdio(connect: Callable[[int], Client]) -> int:
    """Serve one editor until it disconnects; returns LSP's exit code. Standard output belongs to the protocol; other
    output of this process goes to standard error."""
    # pygls logs every message, which contains the user's text.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    server = InlineLanguageServer(connect)
    server.start_io(sys.stdin.buffer, private_stdout())
    return 0 if server.protocol._shutdown else 1


def private_stdout() -> BinaryIO:
    """A file for the original standard output, which is redirected to standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
