"""An editor that starts `specdec lsp`, and a server for it to talk to."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import grpc
from lsprotocol import types
from pygls.lsp.client import LanguageClient

from server.lsp.language_server import STATUS
from server.serving import Serving
from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.completion.editor import Server
from tests.server.harness import make_config, quick_policy

LSP = [sys.executable, "-m", "specdec.cli.main", "lsp"]
URI = "file:///home/someone/project/src/a.py"
FOLDER = types.WorkspaceFolder("file:///home/someone/project", "project")
INVOKED = types.InlineCompletionTriggerKind.Invoked
AUTOMATIC = types.InlineCompletionTriggerKind.Automatic


def plain(value: Any) -> Any:
    """Convert named tuples, which pygls makes of objects of unknown type, to dicts, recursively."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    return [plain(field) for field in value] if isinstance(value, list) else value


class Editor:
    """A client of a language server that records what it receives."""

    def __init__(self) -> None:
        self.client = LanguageClient("test-editor", "1")
        self.messages: list[str] = []
        self.statuses: list[dict[str, str]] = []
        self.changed = asyncio.Event()
        self.version = 1
        self.offered = types.ServerCapabilities()

        @self.client.feature(types.WINDOW_SHOW_MESSAGE)
        def show(params: types.ShowMessageParams) -> None:
            self.messages.append(params.message)

        @self.client.feature(STATUS)
        def status(params: Any) -> None:
            self.statuses.append(plain(params))
            self.changed.set()

    async def hello(
        self, options: dict[str, Any], encodings: Sequence[str] = ("utf-16",), *, inline: bool = True
    ) -> types.InitializeResult:
        """Initialize, and send the notification."""
        initialize_params = types.InitializeParams(
            capabilities=types.ClientCapabilities(
                general=types.GeneralClientCapabilities(
                    position_encodings=[types.PositionEncodingKind(name) for name in encodings]
                ),
                text_document=types.TextDocumentClientCapabilities(
                    inline_completion=types.InlineCompletionClientCapabilities() if inline else None
                ),
            ),
            workspace_folders=[FOLDER],
            initialization_options=options,
        )
        result = await self.client.initialize_async(initialize_params)
        self.offered = result.capabilities
        self.client.initialized(types.InitializedParams())
        return result

    async def until(self, state: str) -> dict[str, str]:
        """Wait for a state and return its parameters."""
        async with asyncio.timeout(20):
            while not self.statuses or self.statuses[-1]["state"] != state:
                self.changed.clear()
                await self.changed.wait()
        return self.statuses[-1]

    def open(self, text: str, uri: str = URI) -> None:
        """Open a document."""
        self.client.text_document_did_open(
            types.DidOpenTextDocumentParams(types.TextDocumentItem(uri, "python", 1, text))
        )

    def edit(self, start: tuple[int, int], end: tuple[int, int], text: str, uri: str = URI) -> None:
        """Put ``text`` into the place of a range."""
        self.version += 1
        change = types.TextDocumentContentChangePartial(types.Range(types.Position(*start), types.Position(*end)), text)
        self.client.text_document_did_change(
            types.DidChangeTextDocumentParams(types.VersionedTextDocumentIdentifier(self.version, uri), [change])
        )

    async def complete(
        self,
        line: int,
        character: int,
        kind: types.InlineCompletionTriggerKind = AUTOMATIC,
        menu: types.SelectedCompletionInfo | None = None,
        uri: str = URI,
    ) -> list[types.InlineCompletionItem]:
        """Return the suggestions at a position."""
        params = types.InlineCompletionParams(
            types.InlineCompletionContext(kind, menu),
            types.TextDocumentIdentifier(uri),
            types.Position(line, character),
        )
        async with asyncio.timeout(20):
            found = await self.client.text_document_inline_completion_async(params)
        assert isinstance(found, list)
        return found


class Addressed(Server):
    """A running server whose address is known."""

    address = ""


@asynccontextmanager
async def running(port: int = 0, **config: Any) -> AsyncIterator[Addressed]:
    """A server over the book engine that is ready, on a port of the system's choice or on ``port``."""
    made = make_config(**config)
    made = made.model_copy(update={"server": made.server.model_copy(update={"grpc_port": port})})
    serving = Serving(made, lambda _: CodeTokenizer(), factory=BOOKS, policy=quick_policy())
    addresses = await serving.start()
    try:
        await serving.wait_ready()
        address = f"127.0.0.1:{addresses.grpc_port}"
        async with grpc.aio.insecure_channel(address) as channel:
            server = Addressed(serving, channel)
            server.address = address
            yield server
    finally:
        await serving.stop(drain_s=0)


@asynccontextmanager
async def editing(
    address: str, options: dict[str, Any] | None = None, *, args: Sequence[str] = (), wait: str = "ready", **more: Any
) -> AsyncIterator[Editor]:
    """An editor with its own language server, which must exit cleanly."""
    editor = Editor()
    await editor.client.start_io(*LSP, "--server", address, *args)
    try:
        await editor.hello({"debounceMs": 0, "timeLimitMs": 20_000, "ttftMs": 0, **(options or {})}, **more)
        if wait:
            await editor.until(wait)
        yield editor
        async with asyncio.timeout(20):
            await editor.client.shutdown_async(None)
            editor.client.exit(None)
            await editor.client.stop()
        assert editor.client._server is not None
        assert editor.client._server.returncode == 0
    finally:
        process = editor.client._server
        if process is not None and process.returncode is None:
            process.kill()


def position(text: str, place: int) -> tuple[int, int]:
    """Line and UTF-16 character of an index; lines end in line feeds."""
    above = text[:place].split("\n")
    return len(above) - 1, len(above[-1].encode("utf-16-le")) // 2


def without(cut: str) -> tuple[str, tuple[int, int]]:
    """The book without its last ``cut``, and the position of that text."""
    place = BOOK.rindex(cut)
    text = BOOK[:place] + BOOK[place + len(cut) :]
    return text, position(text, place)
