"""`textDocument/copilotInlineEdit`: what the server is asked, and which of its edits the editor gets."""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import AsyncGenerator
from typing import Any

import grpc
import pytest
from lsprotocol import types
from pygls.exceptions import JsonRpcException

from server.completion.documents import OffsetUnit
from server.lsp.completer import ACCEPT_COMMAND
from server.lsp.documents import DocumentTable, OpenDocument, Project, Settings
from server.lsp.inline_edits import EDIT_CHARACTERS, MAX_DEBOUNCE_S, RECENT_EDITS, InlineEdits
from server.lsp.language_server import DID_DISMISS, INLINE_EDIT
from server.lsp.session import LinkState, Notices
from specdec.api.v1 import completion_pb2 as pb
from specdec.client.client import Client
from specdec.client.connection import CallError
from tests.fake_engine import BOOK
from tests.server.lsp.editor import FOLDER, URI, Editor, editing, plain, position, running

OPTIONS = {"editModel": "book"}  # it replaces "values" by "numbers"
AT = position(BOOK, BOOK.index("values):"))
READY = {"state": "ready", "message": "", "model": "", "nextEdits": ""}


async def predict(editor: Editor, at: tuple[int, int] = AT, **fields: Any) -> list[Any]:
    """Ask for the next edit at a position, as Copilot's clients do."""
    place = {"line": at[0], "character": at[1]}
    params = {
        "textDocument": {"uri": URI, "version": editor.version}, "position": place, "context": {"triggerKind": 2},
    }  # fmt: skip
    async with asyncio.timeout(20):
        return list((await editor.client.protocol.send_request_async(INLINE_EDIT, {**params, **fields})).edits)


def rename(editor: Editor) -> None:
    """Type another name of the parameter, key by key."""
    line, start = AT
    editor.edit((line, start), (line, start + len("values")), "")
    for i, key in enumerate("numbers"):
        editor.edit((line, start + i), (line, start + i), key)


async def test_the_edits_come_one_by_one_as_they_are_taken() -> None:
    async with running() as server, editing(server.address, OPTIONS) as editor:
        editor.open(BOOK)
        rename(editor)
        text, taken = BOOK.replace("mean(values)", "mean(numbers)"), 0
        while edits := await predict(editor):
            [edit] = edits
            taken += 1
            assert (edit.textDocument.uri, edit.textDocument.version) == (URI, editor.version)
            assert (edit.command.command, len(edit.command.arguments)) == (ACCEPT_COMMAND, 1)
            start, end = ((at.line, at.character) for at in (edit.range.start, edit.range.end))
            head, tail = (len("".join(text.splitlines(True)[:line])) + character for line, character in (start, end))
            text = text[:head] + edit.text + text[tail:]
            editor.edit(start, end, edit.text)
        assert text == BOOK.replace("values", "numbers")
        assert taken > 1
        # an answer's other edits need no other request; after its last one the server is asked again
        assert await server.idle(submitted=2, aborted=0)


async def test_an_edit_that_is_taken_counts_as_accepted() -> None:
    async with running() as server, editing(server.address, OPTIONS) as editor:
        editor.open(BOOK)
        rename(editor)
        [edit] = await predict(editor)
        taken = types.ExecuteCommandParams(edit.command.command, edit.command.arguments)
        await editor.client.workspace_execute_command_async(taken)
        outcomes = server.serving.models.first.outcomes.metrics
        async with asyncio.timeout(20):
            while not outcomes.suggestion_outcomes["accepted"]:
                await asyncio.sleep(0.02)
        assert outcomes.suggestions == 1


async def test_a_bad_request_gets_an_error_that_names_the_field() -> None:
    async with running() as server, editing(server.address, OPTIONS) as editor:
        editor.open(BOOK)
        for fields, problem in (
            ({"position": {"line": -1, "character": 0}}, "position"),
            ({"textDocument": {}}, "text_document.uri"),
            ({"position": {"line": 99, "character": 0}}, "position.line: 99 is beyond the document"),
        ):
            with pytest.raises(JsonRpcException, match=problem) as refused:
                await predict(editor, **fields)
            assert refused.value.code == types.ErrorCodes.InvalidParams
        assert await predict(editor) == []  # nothing was changed
        rename(editor)
        assert await predict(editor)


async def test_the_status_says_what_runs_and_why_no_edits_come() -> None:
    async with running() as server, editing(server.address) as editor:
        editor.open(BOOK)
        rename(editor)
        assert await predict(editor) == []
        assert "book is not trained on next edits" in editor.statuses[-1]["nextEdits"]
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams(OPTIONS))
        assert await predict(editor)
        assert editor.statuses[-1]["nextEdits"] == ""
        assert [status["state"] for status in editor.statuses[-2:]] == ["busy", "ready"]
        editor.client.workspace_did_change_configuration(types.DidChangeConfigurationParams({"editModel": "absent"}))
        assert await predict(editor) == []
        assert "absent" in editor.statuses[-1]["nextEdits"]
    async with running() as server, editing(server.address, {**OPTIONS, "disabledLanguages": ["python"]}) as editor:
        editor.open(BOOK)
        rename(editor)
        assert await predict(editor) == []
        assert await server.idle(submitted=0)


class Server:
    """The server's side of predictions, which the test answers."""

    model = "sweep-next-edit-1.5b"
    settings: Settings

    def __init__(self) -> None:
        self.client = self.completion = self
        self.asked: list[pb.PredictEditRequest] = []
        self.answers: asyncio.Queue[pb.TextEdit | CallError | None] = asyncio.Queue()
        self.running = 0

    async def predict_edit(self, message: pb.PredictEditRequest) -> AsyncGenerator[pb.PredictEditResponse, None]:
        self.asked.append(message)
        self.running += 1
        try:
            while answer := await self.answers.get():
                if isinstance(answer, CallError):
                    raise answer
                yield pb.PredictEditResponse(edit=answer)
        finally:
            self.running -= 1


class Desk:
    """The language server's part for next edits, with two open documents."""

    def __init__(self, **settings: Any) -> None:
        self.server, self.statuses = Server(), list[dict[str, str]]()
        self.table = DocumentTable(Project([FOLDER]), OffsetUnit.UTF16)
        notices = Notices(lambda text: None, self.statuses.append)
        notices.state(LinkState.READY)
        link: Any = self.server
        link.settings = Settings.model_validate({"debounceMs": 0, **settings})
        self.edits = InlineEdits(self.table, link, notices)
        lines = "".join(f"line {i}\n" for i in range(60))
        self.document, self.other = (self.open(name, lines) for name in ("a.py", "b.py"))

    def open(self, name: str, text: str) -> OpenDocument:
        return self.table.open(types.TextDocumentItem(f"{FOLDER.uri}/{name}", "python", 1, text))

    def change(self, line: int, text: str, *, lines: int = 0, document: OpenDocument | None = None) -> None:
        """Insert ``text`` at a line's begin in place of so many lines."""
        where = types.Range(types.Position(line, 0), types.Position(line + lines, 0))
        self.edits.apply(document or self.document, [types.TextDocumentContentChangePartial(where, text)])

    def ask(
        self, line: int = 0, *, invoked: bool = True, document: OpenDocument | None = None
    ) -> asyncio.Task[tuple[pb.TextEdit, str] | None]:
        uri, where = (document or self.document).uri, types.Position(line, 0)
        return asyncio.create_task(self.edits.next_edit(uri, where, invoked=invoked))

    async def asked(self, count: int) -> pb.PredictEditRequest:
        """The server's request number ``count``, once it has come."""
        async with asyncio.timeout(10):
            while len(self.server.asked) < count:
                await asyncio.sleep(0)
        return self.server.asked[count - 1]


EDIT = pb.TextEdit(start=0, end=4, text="LINE")


def changed_lines(edit: pb.RecentEdit) -> tuple[list[str], list[str]]:
    """The lines that an edit removed and added."""
    lines = list(difflib.ndiff(edit.before.splitlines(), edit.after.splitlines()))
    removed, added = ([line[2:] for line in lines if line[0] == mark] for mark in "-+")
    return removed, added


async def test_the_server_gets_what_the_user_changed_and_sees() -> None:
    desk = Desk()
    for key in reversed("word "):
        desk.change(10, key)
    desk.change(11, "", lines=1)  # the next line: the same edit
    desk.change(40, "far\n")
    desk.change(2, "else", document=desk.other)
    desk.change(0, "secret", document=desk.open(".env", "x\n"))
    asking = desk.ask(11)
    message = await desk.asked(1)
    assert [(edit.path, *changed_lines(edit)) for edit in message.recent] == [
        ("a.py", ["line 10", "line 11"], ["word line 10"]),
        ("a.py", [], ["far"]),
        ("b.py", ["line 2"], ["elseline 2"]),
    ]
    assert all(len(edit.before) < 100 for edit in message.recent)
    assert (message.path, message.text, message.model) == ("a.py", desk.document.text, Server.model)
    assert [file.filename for file in message.extra] == ["b.py"]
    assert message.text[message.cursor :].startswith("line 12\n")
    asking.cancel()


async def test_recorded_edits_of_a_file_that_is_excluded_later_are_not_sent() -> None:
    desk = Desk()
    desk.change(2, "password ", document=desk.other)
    desk.change(10, "new\n")
    desk.change(2, "again ", document=desk.other)  # not complete
    desk.server.settings = desk.server.settings.model_copy(update={"exclude": ("b.*",)})
    asking = desk.ask(11)
    assert [edit.path for edit in (await desk.asked(1)).recent] == ["a.py"]
    asking.cancel()


async def test_recent_edits_are_few_and_short() -> None:
    desk = Desk()
    for i in range(3 * RECENT_EDITS):
        desk.change(i % 2 * 30, "x")
    desk.change(50, "y" * EDIT_CHARACTERS)  # pasted
    desk.change(0, "z")
    desk.change(0, "z" * 4, document=desk.other)
    desk.edits.apply(desk.other, [types.TextDocumentContentChangeWholeDocument("read again\n")])
    recent = desk.edits.history.recent()
    assert len(recent) == RECENT_EDITS
    assert (recent[-1].path, recent[-2].path) == ("b.py", "a.py")
    assert not any("y" in edit.after for edit in recent)
    desk.change(0, "again ", document=desk.other)
    desk.edits.apply(desk.other, [_deleted(6)])
    assert desk.edits.history.recent() == recent  # typed and deleted: no edit


@pytest.mark.parametrize("change", ["taken back", "too long"])
async def test_bug_changes_without_an_edit_to_send_ask_for_none(change: str) -> None:
    desk = Desk()
    if change == "taken back":
        desk.change(0, "again ")
        desk.edits.apply(desk.document, [_deleted(6)])
    else:
        desk.change(0, "y" * EDIT_CHARACTERS)
    async with asyncio.timeout(10):
        assert await desk.ask(invoked=False) is None
    assert desk.server.asked == []


def test_a_long_edit_is_two() -> None:
    desk = Desk()
    for i in range(30):
        desk.change(10 + i, f"new {i}\n")
    added = [changed_lines(edit)[1] for edit in desk.edits.history.recent()]
    assert [line for lines in added for line in lines] == [f"new {i}" for i in range(30)]
    assert len(added) == 2


def _deleted(characters: int) -> types.TextDocumentContentChangePartial:
    return types.TextDocumentContentChangePartial(types.Range(types.Position(0, 0), types.Position(0, characters)), "")


@pytest.mark.parametrize("by", ["change", "change elsewhere", "newer request", "cancel", "close"])
async def test_what_the_user_does_next_ends_the_request(by: str) -> None:
    desk = Desk()
    first = desk.ask()
    await desk.asked(1)
    if by == "newer request":
        newer = desk.ask(5)
        await desk.asked(2)
        desk.server.answers.put_nowait(EDIT)
        assert await newer is not None
    elif by == "cancel":
        first.cancel()
    elif by == "close":
        desk.edits.cancel()
    else:
        desk.change(50, "x", document=desk.other if by == "change elsewhere" else None)
    await asyncio.wait([first], timeout=10)
    assert first.cancelled() if by == "cancel" else first.result() is None
    await asyncio.sleep(0)
    assert desk.server.running == (by == "newer request")


async def test_a_request_that_ends_before_it_is_sent_is_answered() -> None:
    desk = Desk()
    asking = desk.ask()
    while desk.edits._prediction is None:
        await asyncio.sleep(0)
    desk.change(50, "x")
    async with asyncio.timeout(10):
        assert await asking is None
    assert desk.server.asked == []


async def test_an_answer_to_another_text_is_dropped() -> None:
    desk = Desk()
    asking = desk.ask()
    await desk.asked(1)
    desk.server.answers.put_nowait(EDIT)
    desk.document.apply([_deleted(1)])  # after the answer came, before it is given
    assert await asking is None


async def test_the_rest_of_an_answer_waits_until_the_first_edit_is_taken() -> None:
    desk = Desk()
    for edit in (pb.TextEdit(start=0, end=4, text="first line"), pb.TextEdit(start=7, end=11, text="LINE"), None):
        desk.server.answers.put_nowait(edit)
    found = await desk.ask()
    assert found is not None
    where = desk.document.range_of(found[0].start, found[0].end)
    desk.edits.apply(desk.document, [types.TextDocumentContentChangePartial(where, found[0].text)])
    assert await desk.ask() == (pb.TextEdit(start=13, end=17, text="LINE"), found[1])
    assert len(desk.server.asked) == 1
    desk.change(30, "other")  # the second one is not taken
    again = desk.ask()
    await desk.asked(2)
    again.cancel()


async def test_a_newer_request_does_not_take_the_edit_that_an_older_one_waits_for() -> None:
    """Both would count the same edits as applied."""
    desk = Desk()
    desk.server.answers.put_nowait(pb.TextEdit(start=0, end=4, text="first line"))
    found = await desk.ask()
    assert found is not None
    where = desk.document.range_of(found[0].start, found[0].end)
    desk.edits.apply(desk.document, [types.TextDocumentContentChangePartial(where, found[0].text)])
    older = desk.ask()
    await asyncio.sleep(0)
    newer = desk.ask()
    assert await older is None
    await desk.asked(2)
    desk.server.answers.put_nowait(pb.TextEdit(start=13, end=17, text="LINE"))
    edit = await newer
    assert edit is not None
    assert desk.document.text[edit[0].start : edit[0].end] == "line"


async def test_a_text_in_which_an_edit_was_dismissed_gets_no_other_unasked() -> None:
    async with running() as server, editing(server.address, OPTIONS) as editor:
        editor.open(BOOK)
        rename(editor)
        [edit] = await predict(editor)
        editor.client.protocol.notify(DID_DISMISS, {"item": plain(edit)})
        assert await predict(editor) == []
        assert await predict(editor, (0, 0)) == []
        assert await predict(editor, context={"triggerKind": 1})
        editor.edit((0, 0), (0, 0), "#")
        assert await predict(editor)
        outcomes = server.serving.models.first.outcomes.metrics.suggestion_outcomes
        async with asyncio.timeout(20):
            while not outcomes["rejected"]:
                await asyncio.sleep(0.02)


async def test_a_dismissal_holds_for_every_document_until_its_text_changes() -> None:
    desk = Desk()
    documents = (desk.document, desk.other)
    for document in documents:
        desk.change(3, "x", document=document)
        desk.server.answers.put_nowait(EDIT)
        found = await desk.ask(invoked=False, document=document)
        assert found is not None
        desk.edits.dismissed(found[1])
    for document in documents:
        assert await desk.ask(invoked=False, document=document) is None
    assert len(desk.server.asked) == 2
    for document in documents:
        desk.change(3, "y", document=document)
        desk.server.answers.put_nowait(EDIT)
        assert await desk.ask(invoked=False, document=document) is not None


@pytest.mark.parametrize("changed", [True, False])
async def test_a_late_dismissal_concerns_only_the_text_of_its_edit(changed: bool) -> None:
    desk = Desk()
    desk.change(3, "x")
    desk.server.answers.put_nowait(EDIT)
    found = await desk.ask(invoked=False)
    assert found is not None
    if changed:
        desk.change(3, "y")
    newer = desk.ask(invoked=False)
    await desk.asked(2)
    desk.edits.dismissed(found[1])
    desk.server.answers.put_nowait(EDIT)
    async with asyncio.timeout(10):
        assert (await newer is not None) == changed


async def test_a_dismissal_without_an_id_is_ignored() -> None:
    desk = Desk()
    asking = desk.ask()
    await desk.asked(1)
    desk.edits.dismissed("")
    desk.server.answers.put_nowait(EDIT)
    assert await asking is not None


async def test_an_error_of_the_server_is_the_status_until_it_answers() -> None:
    desk = Desk()
    desk.server.answers.put_nowait(CallError(grpc.StatusCode.UNIMPLEMENTED, "no such method", reached=True))
    assert await desk.ask() is None
    assert "no such method" in desk.statuses[-1]["nextEdits"]
    desk.server.answers.put_nowait(None)
    assert await desk.ask() is None
    assert desk.statuses[-1] == READY


async def test_a_client_that_closes_is_no_reason_why_no_edits_come() -> None:
    async with running() as server, Client(server.address) as client:
        desk = Desk(editModel="book", cacheSalt="slow")
        desk.server.completion = client.completion  # type: ignore[assignment]
        asking = desk.ask()
        async with asyncio.timeout(10):
            while not server.serving.client.in_flight:
                await asyncio.sleep(0.01)
        await client.close()
        assert await asking is None
        assert desk.statuses[-1] == READY


@pytest.mark.parametrize(
    ("settings", "invoked", "wanted"),
    [
        ({}, False, True),
        ({"mode": "manual"}, False, False),
        ({"mode": "manual"}, True, True),
        ({"mode": "off"}, True, False),
        ({"nextEdits": False}, True, False),
        ({"disabledLanguages": ["python"]}, True, False),
        ({"exclude": ["a.*"]}, True, False),
    ],
)
async def test_settings_decide_where_edits_are_predicted(settings: dict[str, Any], invoked: bool, wanted: bool) -> None:
    desk = Desk(**settings)
    assert await desk.ask(invoked=False) is None  # nothing was changed
    desk.change(3, "new\n")
    desk.server.answers.put_nowait(EDIT)
    assert bool(await desk.ask(invoked=invoked)) == wanted
    assert len(desk.server.asked) == wanted


def test_the_debounce_follows_the_latency_within_bounds() -> None:
    edits = Desk(debounceMs=10).edits
    for answer_s, debounce_s in ((0.0, 0.01), (0.4, 0.1), (60.0, MAX_DEBOUNCE_S)):
        edits._answer_s = answer_s
        assert edits._debounce_s() == pytest.approx(debounce_s)
    assert Desk(debounceMs=500).edits._debounce_s() == 0.5
