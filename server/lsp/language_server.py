"""The language server: LSP's messages, one handler each, over standard input and output."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Generator
from typing import Any, BinaryIO

from lsprotocol import types
from pygls.exceptions import JsonRpcInvalidParams
from pygls.lsp.server import LanguageServer
from pygls.protocol import LanguageServerProtocol, lsp_method

import specdec
from server.lsp.completer import ACCEPT_COMMAND, Workplace
from server.lsp.documents import BeyondDocumentError, PositionEncoding, plain
from server.lsp.session import LinkState, Notices
from specdec.client.client import Client

_LOG = logging.getLogger(__name__)

_Handled = Generator[Any, Any, None]


class InlineProtocol(LanguageServerProtocol):
    """pygls's own copy of the documents would cost each key a second time, and it parts lines at characters that end
    none in LSP."""

    @lsp_method(types.TEXT_DOCUMENT_DID_OPEN)
    def lsp_text_document__did_open(self, params: types.DidOpenTextDocumentParams) -> _Handled:
        """To the server."""
        yield self.fm.features[types.TEXT_DOCUMENT_DID_OPEN], (params,), None

    @lsp_method(types.TEXT_DOCUMENT_DID_CHANGE)
    def lsp_text_document__did_change(self, params: types.DidChangeTextDocumentParams) -> _Handled:
        """To the server."""
        yield self.fm.features[types.TEXT_DOCUMENT_DID_CHANGE], (params,), None

    @lsp_method(types.TEXT_DOCUMENT_DID_CLOSE)
    def lsp_text_document__did_close(self, params: types.DidCloseTextDocumentParams) -> _Handled:
        """To the server."""
        yield self.fm.features[types.TEXT_DOCUMENT_DID_CLOSE], (params,), None


# Names of the first three as in Copilot's language server, so that clients written for it report to us too.
DID_SHOW = "textDocument/didShowCompletion"
DID_ACCEPT_PART = "textDocument/didPartiallyAcceptCompletion"
DID_ACCEPT = "textDocument/didAcceptCompletion"
DID_DISMISS = "textDocument/didDismissCompletion"
STATUS = "specdec/didChangeStatus"


class InlineLanguageServer(LanguageServer):
    """``connect`` makes a client of the specdec server. ``clean``: whether the editor said goodbye."""

    def __init__(self, connect: Callable[[], Client]) -> None:
        super().__init__("specdec", specdec.__version__, protocol_cls=InlineProtocol)
        self.connect = connect
        self.clean = False
        self.workplace: Workplace | None = None
        _add_life_cycle(self)
        _add_documents(self)
        _add_completion(self)
        _add_outcomes(self)

    def report_server_error(self, error: Exception, source: Any) -> None:
        """Into the log: a user can do nothing about it, least of all at every key."""
        _LOG.error("%s: %s", getattr(source, "__name__", source), error)

    def notices(self) -> Notices:
        """What speaks to the editor's user."""

        def show(text: str) -> None:
            self.window_show_message(types.ShowMessageParams(types.MessageType.Warning, f"specdec: {text}"))

        def status(state: LinkState, text: str, model: str) -> None:
            self.protocol.notify(STATUS, {"state": state.value, "message": text, "model": model})

        return Notices(show, status)


def _add_life_cycle(server: InlineLanguageServer) -> None:
    @server.feature(types.INITIALIZE)
    def initialize(params: types.InitializeParams) -> None:
        agreed = server.workspace.position_encoding
        encoding = PositionEncoding(str(getattr(agreed, "value", agreed)))
        server.workplace = Workplace(params, encoding, server.connect, server.notices())

    @server.feature(types.INITIALIZED)
    async def initialized(params: types.InitializedParams) -> None:
        if server.workplace is not None:
            server.workplace.start()

    @server.feature(types.WORKSPACE_DID_CHANGE_CONFIGURATION)
    async def configure(params: types.DidChangeConfigurationParams) -> None:
        if server.workplace is not None:
            server.workplace.configure(plain(params.settings))

    @server.feature(types.WORKSPACE_DID_CHANGE_WORKSPACE_FOLDERS)
    def folders(params: types.DidChangeWorkspaceFoldersParams) -> None:
        if server.workplace is not None:
            server.workplace.project.change(params.event.added, params.event.removed)

    @server.feature(types.SHUTDOWN)
    async def shutdown(params: None) -> None:
        server.clean = True
        if server.workplace is not None:
            await server.workplace.close()


def _add_documents(server: InlineLanguageServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_DID_OPEN)
    def opened(params: types.DidOpenTextDocumentParams) -> None:
        if server.workplace is not None:
            server.workplace.documents.open(params.text_document)

    @server.feature(types.TEXT_DOCUMENT_DID_CHANGE)
    def changed(params: types.DidChangeTextDocumentParams) -> None:
        document = None if server.workplace is None else server.workplace.documents.get(params.text_document.uri)
        if document is not None:
            document.apply(params.content_changes)

    @server.feature(types.TEXT_DOCUMENT_DID_CLOSE)
    def closed(params: types.DidCloseTextDocumentParams) -> None:
        if server.workplace is not None:
            server.workplace.close_document(params.text_document.uri)


def _add_completion(server: InlineLanguageServer) -> None:
    @server.feature(types.TEXT_DOCUMENT_INLINE_COMPLETION, types.InlineCompletionOptions())
    async def complete(params: types.InlineCompletionParams) -> list[types.InlineCompletionItem]:
        if server.workplace is None:
            return []
        try:
            return await server.workplace.completer.complete(params)
        except BeyondDocumentError as error:
            raise JsonRpcInvalidParams(str(error)) from None


def _add_outcomes(server: InlineLanguageServer) -> None:
    def of_item(told: Any) -> tuple[str, Any]:
        """The suggestion that a notification is about, and the whole of what it says."""
        values = plain(told)
        try:
            return str(values["item"]["command"]["arguments"][0]), values
        except (KeyError, IndexError, TypeError):
            return "", {}

    @server.command(ACCEPT_COMMAND)
    def accept(suggestion_id: str) -> None:
        if server.workplace is not None:
            server.workplace.outcomes.accepted(suggestion_id)

    @server.feature(DID_ACCEPT)
    def accepted(params: Any) -> None:
        if server.workplace is not None:
            server.workplace.outcomes.accepted(of_item(params)[0])

    @server.feature(DID_SHOW)
    def shown(params: Any) -> None:
        if server.workplace is not None:
            server.workplace.outcomes.shown(of_item(params)[0])

    @server.feature(DID_DISMISS)
    def dismissed(params: Any) -> None:
        if server.workplace is not None:
            server.workplace.outcomes.dismissed(of_item(params)[0])

    @server.feature(DID_ACCEPT_PART)
    def accepted_part(params: Any) -> None:
        suggestion_id, values = of_item(params)
        length = values.get("acceptedLength")
        if server.workplace is not None and isinstance(length, int):
            server.workplace.outcomes.partly_accepted(suggestion_id, length)


def run_stdio(connect: Callable[[], Client]) -> int:
    """Serve one editor until it goes; the exit code that LSP asks for. Standard output belongs to the protocol:
    whatever else is printed in this process goes to standard error."""
    # pygls logs every message, and that is the user's text.
    logging.getLogger("pygls").setLevel(logging.CRITICAL)
    server = InlineLanguageServer(connect)
    server.start_io(sys.stdin.buffer, private_stdout())
    return 0 if server.clean else 1


def private_stdout() -> BinaryIO:
    """A file for what was standard output, which now is standard error."""
    sys.stdout.flush()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out
