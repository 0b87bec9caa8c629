"""`specdec lsp` over stdio, driven by a pygls client, against a server on real sockets."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from server.completion.editor_session import DOCUMENTS
from server.lsp.completer import ACCEPT_COMMAND, CHOICES
from server.lsp.language_server import DID_ACCEPT_PART, DID_DISMISS, DID_FOCUS, DID_SHOW, InlineLanguageServer
from tests.fake_engine import BOOK
from tests.server.lsp.editor import AUTOMATIC, INVOKED, URI, Addressed, Editor, editing, running, without

LINE = "total = add(total, value)"
SLOW = {"cacheSalt": "slower"}


async def test_a_suggestion_while_typing() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        editor.open(text)
        [item] = await editor.complete(line, character)
        assert item.insert_text == LINE
        assert item.range == types.Range(types.Position(line, character), types.Position(line, character))
        for typed, rest in (("tot", "al = add(total, value)"), ("al =", " add(total, value)")):
            editor.edit((line, character), (line, character), typed)
            character += len(typed)
            [item] = await editor.complete(line, character, AUTOMATIC)
            assert item.insert_text == rest
        assert await server.idle(submitted=1)  # both continued the first generation
        editor.edit((line, character - 7), (line, character), "return")
        [item] = await editor.complete(line, character - 1)
        assert item.insert_text == "?"  # the book does not continue like this
        assert await server.idle(submitted=2)


async def test_a_suggestion_without_a_time_limit() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, {"timeLimitMs": None}) as editor:
        editor.open(text)
        [item] = await editor.complete(line, character)
        assert item.insert_text == LINE


async def test_a_suggestion_that_meets_its_limit_ends_with_no_white_space() -> None:
    before, line = BOOK[: BOOK.index("total = first")], "total = first + second"
    async with running() as server, editing(server.address, {"maxTokens": len(line) + 3}) as editor:
        editor.open(before)
        [item] = await editor.complete(2, 4)
        assert item.insert_text == line  # not half of the next line's indentation
        editor.edit((2, 4), (2, 4), line)
        [item] = await editor.complete(2, 4 + len(line))
        assert item.insert_text == "\n    return total"


async def test_an_explicit_request_gets_alternatives() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        editor.open(text)
        first, *others = await editor.complete(line, character, INVOKED)
        assert first.insert_text == LINE
        assert len({item.insert_text for item in others}) == CHOICES - 1
        assert all(item.range == first.range for item in others)
        assert await server.idle(submitted=CHOICES)
        assert others[1].command is not None
        await editor.client.workspace_execute_command_async(
            types.ExecuteCommandParams(ACCEPT_COMMAND, others[1].command.arguments)
        )
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
        async with asyncio.timeout(20):
            while not outcomes["accepted"]:
                await asyncio.sleep(0.02)
        editor.edit((line, character), (line, character), "return")
        [item] = await editor.complete(line, character + 6)
        assert item.insert_text == "?"


async def test_an_editor_without_inline_completion_gets_a_menu_item() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        assert editor.offered.completion_provider is None
    async with running() as server, editing(server.address, inline=False) as editor:
        assert editor.offered.completion_provider is not None
        editor.open(text)
        editor.edit((line, character), (line, character), "tot")
        for at, items in ((character + 3, 1), (0, 0)):
            where = types.CompletionParams(types.TextDocumentIdentifier(URI), types.Position(line, at))
            menu = await editor.client.text_document_completion_async(where)
            assert isinstance(menu, types.CompletionList)
            assert len(menu.items) >= items
            if items:
                [item] = menu.items
                start, end = types.Position(line, character), types.Position(line, at)
                assert item.text_edit == types.TextEdit(types.Range(start, end), LINE)
                assert item.label == LINE


async def test_an_invalid_request_gets_an_error() -> None:
    async with running() as server, editing(server.address) as editor:
        editor.open("one\n")
        kind: Any = SimpleNamespace(value=7)  # serialised like a member of an enumeration
        context = types.InlineCompletionContext(kind)
        params = types.InlineCompletionParams(context, types.TextDocumentIdentifier(URI), types.Position(0, 0))
        with pytest.raises(JsonRpcException, match="trigger_kind") as refused:
            await asyncio.wait_for(editor.client.text_document_inline_completion_async(params), 20)
        assert refused.value.code == types.ErrorCodes.InvalidParams
        assert await editor.complete(0, 3)


async def test_a_nonexistent_line_is_rejected() -> None:
    async with running() as server, editing(server.address) as editor:
        editor.open("one\ntwo\n")
        for line in (3, 99):
            with pytest.raises(
                JsonRpcException, match=f"position.line: {line} is beyond the document, .* 3 lines"
            ) as status:
                await editor.complete(line, 0)
            assert status.value.code == types.ErrorCodes.InvalidParams
        await editor.complete(2, 0)
        await editor.complete(1, 99)  # the line's end, as LSP has it


async def test_server_capabilities() -> None:
    async with running() as server:
        async with editing(server.address, wait="") as editor:
            status = await editor.until("ready")
            assert (status["model"], status["message"]) == ("book", "")
        async with editing(server.address, encodings=("utf-8", "utf-16")) as editor:
            text, (line, _) = without(LINE)
            editor.open('"é😀"\n' + text)
            editor.edit((0, 7), (0, 8), "…'")  # bytes: between the smiley and the quotation mark
            [item] = await editor.complete(line + 1, 8)
            assert item.insert_text == LINE


async def test_an_open_menu() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        editor.open(text)
        editor.edit((line, character), (line, character), "to")
        where = types.Range(types.Position(line, character), types.Position(line, character + 2))
        [item] = await editor.complete(line, character + 2, menu=types.SelectedCompletionInfo(where, "total"))
        assert (item.insert_text, item.range) == (LINE, where)
        editor.edit((line, character), (line, character + 2), "total")  # it was taken
        [item] = await editor.complete(line, character + 5)
        assert item.insert_text == LINE[5:]
        assert await server.idle(submitted=1)


async def test_a_newer_request_supersedes_and_a_cancel_ends() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, SLOW) as editor:
        editor.open(text)
        first = asyncio.create_task(editor.complete(line, character))
        await generating(server)
        editor.edit((line, character), (line, character), "tot")
        [item] = await editor.complete(line, character + 3)
        assert (await first, item.insert_text) == ([], LINE[3:])
        assert await server.idle(submitted=1, aborted=0)

        params = types.InlineCompletionParams(
            types.InlineCompletionContext(AUTOMATIC), types.TextDocumentIdentifier("file:///home/someone/project/b.py"),
            types.Position(line, character),
        )  # fmt: skip
        editor.open(text, params.text_document.uri)
        await cancelled(server, editor, params)
        assert await server.idle(submitted=2, aborted=1)  # once it is certain that no request continues it


async def generating(server: Addressed) -> None:
    """Wait for some text that a newer request can continue."""
    streams = server.serving.models.first.admission._streams
    async with asyncio.timeout(20):
        while not any(stream.record is not None and stream.record.first_s is not None for stream in streams):
            await asyncio.sleep(0.01)


async def cancelled(server: Addressed, editor: Editor, params: types.InlineCompletionParams) -> None:
    """SuggestionRequest, and take it back."""
    future = editor.client.protocol.send_request(types.TEXT_DOCUMENT_INLINE_COMPLETION, params, msg_id="taken-back")
    await generating(server)
    editor.client.protocol.notify(types.CANCEL_REQUEST, types.CancelParams("taken-back"))
    with pytest.raises(JsonRpcException) as caught:
        await asyncio.wait_for(asyncio.wrap_future(future), 20)
    assert caught.value.code == types.LSPErrorCodes.RequestCancelled


async def test_typing_after_a_cancel_continues_the_text() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, SLOW) as editor:
        editor.open(text)
        uri = types.TextDocumentIdentifier("file:///home/someone/project/src/a.py")
        context = types.InlineCompletionContext(AUTOMATIC)
        await cancelled(server, editor, types.InlineCompletionParams(context, uri, types.Position(line, character)))
        editor.edit((line, character), (line, character), "to")
        [item] = await editor.complete(line, character + 2, AUTOMATIC)
        assert item.insert_text == LINE[2:]
        assert await server.idle(submitted=1, aborted=0)


async def test_outcomes_are_reported() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address) as editor:
        editor.open(text)
        notify = editor.client.protocol.notify
        [item] = await editor.complete(line, character)
        assert item.command is not None
        notify(DID_SHOW, {"item": {"command": {"arguments": item.command.arguments}}})
        await editor.client.workspace_execute_command_async(
            types.ExecuteCommandParams(ACCEPT_COMMAND, item.command.arguments)
        )
        items = [await editor.complete(line, character) for _ in range(2)]
        status = [{"item": {"command": {"arguments": found.command.arguments}}} for [found] in items if found.command]
        notify(DID_SHOW, status[0])
        notify(DID_ACCEPT_PART, {**status[0], "acceptedLength": 5})
        notify(DID_SHOW, status[1])
        notify(DID_DISMISS, status[1])
        notify(DID_SHOW, {"item": {"insertText": "of another server"}})
        await editor.complete(line, character)
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
        for _ in range(100):
            if outcomes["rejected"]:
                break
            await asyncio.sleep(0.02)
        assert (outcomes["accepted"], outcomes["partially_accepted"], outcomes["rejected"]) == (1, 1, 1)


async def test_settings() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, {"mode": "manual", "maxLines": 0}) as editor:
        for _ in range(100):
            if editor.messages:
                break
            await asyncio.sleep(0.02)
        assert len(editor.messages) == 1
        assert "specdec.maxLines" in editor.messages[0]
        editor.open(text)
        editor.open(text, "file:///home/someone/project/.env")
        assert await editor.complete(line, character, AUTOMATIC) == []
        assert await editor.complete(line, character, uri="file:///home/someone/project/.env") == []
        [item, *_] = await editor.complete(line, character, INVOKED)
        assert item.insert_text == LINE
        configure(editor, {"specdec": {"mode": "auto", "maxTokens": 5}})
        [item] = await editor.complete(line, character, AUTOMATIC)
        assert item.insert_text == LINE[:5]
        configure(editor, {"mode": "off"})
        await editor.until("off")
        assert await editor.complete(line, character) == []
        configure(editor, {"mode": "auto", "maxTokens": 9})
        await editor.until("ready")
        [item] = await editor.complete(line, character)
        assert item.insert_text == LINE[:9]


def configure(editor: Editor, settings: object) -> None:
    editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(settings))


async def test_documents_that_the_server_forgot_are_sent_again() -> None:
    text, (line, character) = without(LINE)
    uris = [f"file:///home/someone/project/{i}.py" for i in range(DOCUMENTS + 1)]
    async with running() as server, editing(server.address) as editor:
        for uri in uris:
            editor.open(text, uri)
            assert await editor.complete(line, character, uri=uri)
        editor.edit((line, character), (line, character), "tot", uris[0])
        [item] = await editor.complete(line, character + 3, uri=uris[0])
        assert item.insert_text == LINE[3:]
        editor.client.text_document_did_close(types.DidCloseTextDocumentParams(types.TextDocumentIdentifier(uris[0])))
        assert await editor.complete(line, character, uri=uris[0]) == []
        editor.open("\n" + text, uris[0])
        [item] = await editor.complete(line + 1, character, uri=uris[0])
        assert item.insert_text == LINE


async def test_a_pause_reads_ahead_and_a_key_ends_it() -> None:
    text, (line, character) = without(LINE)
    async with running() as server, editing(server.address, {"ttftMs": 400, **SLOW}) as editor:
        client = server.serving.models.first.client
        editor.open(text)
        async with asyncio.timeout(20):
            while not client.in_flight:  # nobody asked for a suggestion
                await asyncio.sleep(0.01)
        editor.edit((line, character), (line, character), "tot")
        [item] = await editor.complete(line, character + 3)
        assert item.insert_text == LINE[3:]  # not the answer of what was read ahead
        known = server.serving.models.first.maker.time.computed
        async with asyncio.timeout(20):
            while client.in_flight or not known.of("slower"):  # the whole prompt is computed in the next pause
                await asyncio.sleep(0.01)


def test_a_focused_document_is_reported_by_its_address() -> None:
    focused: list[str] = []
    server = InlineLanguageServer(Addressed)  # type: ignore[arg-type]
    server.workplace = SimpleNamespace(focus=focused.append)  # type: ignore[assignment]
    message = {"jsonrpc": "2.0", "method": DID_FOCUS, "params": {"textDocument": {"uri": URI}}}
    server.protocol.fm.features[DID_FOCUS](server.protocol.structure_message(message).params)
    assert focused == [URI]
