"""What an editor is offered for the answers of its server: their order, labels, time limit, and closed documents."""

from __future__ import annotations

import asyncio

import pytest
from lsprotocol import types

from server.completion.documents import OffsetUnit
from server.lsp import completer
from server.lsp.completer import Completer, Outcomes
from server.lsp.documents import DocumentTable, Project, Settings
from server.lsp.session import Answer, LiveSession, SessionLink, SuggestionRequest
from specdec.client.client import Client
from tests.server.lsp.editor import AUTOMATIC, INVOKED, URI
from tests.server.lsp.test_time_limit import link_to, say

DOCUMENT = types.TextDocumentIdentifier(URI)


class Answers(SessionLink):
    """A link whose answers are given, and which counts what it reads ahead."""

    def __init__(self, greedy: str, *sampled: str) -> None:
        self.greedy, self.sampled, self.read = greedy, sampled, 0
        self.release = asyncio.Event()
        self.release.set()

    async def complete(self, request: SuggestionRequest, choices: int = 1) -> list[Answer]:
        await self.release.wait()
        sampled = [Answer(f"sampled {number}", text) for number, text in enumerate(self.sampled)]
        return [Answer("greedy", self.greedy), *sampled[: choices - 1]]

    async def read_ahead(self, request: SuggestionRequest) -> None:
        self.read += 1

    async def report(self, suggestion_id: str, outcome: object) -> None:
        """Drop it."""


def made(link: SessionLink, text: str = "x = ", ttft_ms: float = 0.0) -> tuple[Completer, DocumentTable]:
    documents = DocumentTable(Project(), OffsetUnit.UTF16)
    documents.open(types.TextDocumentItem(URI, "python", 1, text))
    link.settings = Settings(debounceMs=0, ttftMs=ttft_ms)
    return Completer(documents, link, Outcomes(link.report)), documents


def params(kind: types.InlineCompletionTriggerKind, character: int) -> types.InlineCompletionParams:
    return types.InlineCompletionParams(types.InlineCompletionContext(kind), DOCUMENT, types.Position(0, character))


@pytest.mark.parametrize(
    ("sampled", "offered"),
    [("BA", "AB"), ("AB", "AB"), ("AA", "A"), ("BB", "AB"), ("BC", "ABC"), (" B", "AB")],
)
async def test_the_greedy_text_is_first_and_texts_differ(sampled: str, offered: str) -> None:
    asked, _ = made(Answers("A", *sampled))
    items = await asked.complete(params(INVOKED, 4))
    assert [item.insert_text for item in items] == list(offered)
    assert items[0].command is not None
    assert items[0].command.arguments == ["greedy"]


@pytest.mark.parametrize(
    ("document", "text", "label"),
    [
        ("def f():", "\n    return 1", "return 1"),
        ("re", "turn 1\n", "return 1"),
        ("x =", " 1", "1"),
        ("x =", " 1\r\ny = 2", "1"),
    ],
)
async def test_a_menu_item_has_a_label_and_is_inserted_unchanged(document: str, text: str, label: str) -> None:
    asked, _ = made(Answers(text), document)
    menu = await asked.list_one(types.CompletionParams(DOCUMENT, types.Position(0, len(document))))
    assert [item.label for item in menu.items] == [label]
    assert menu.items[0].insert_text_mode is types.InsertTextMode.AsIs  # Emacs indents the lines of others once more


async def test_bug_a_menu_item_behind_a_line_s_end_repeated_the_word() -> None:
    asked, _ = made(Answers("turn 1"), "re\n")
    menu = await asked.list_one(types.CompletionParams(DOCUMENT, types.Position(0, 9)))  # the line's end, as LSP has it
    word = types.Range(types.Position(0, 0), types.Position(0, 2))
    assert [item.text_edit for item in menu.items] == [types.TextEdit(word, "return 1")]


@pytest.mark.parametrize("closed", [False, True])
async def test_a_document_closed_meanwhile_is_not_read_ahead(closed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(completer, "PAUSE_S", 0.0)
    link = Answers("A")
    link.release.clear()
    asked, documents = made(link, ttft_ms=400.0)
    answer = asyncio.create_task(asked.complete(params(AUTOMATIC, 4)))
    await asyncio.sleep(0)
    if closed:
        documents.pop(URI)
    link.release.set()
    await answer
    await asyncio.sleep(0.05)
    assert link.read == (not closed)


async def test_alternatives_keep_the_time_limit() -> None:
    """The server goes silent once the greedy text has begun."""

    async def silent(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await ended.wait()
        writer.close()

    ended = asyncio.Event()
    server = await asyncio.start_server(silent, "127.0.0.1", 0)
    link = link_to(live := LiveSession(None, lambda _: None, lambda _: None), 200.0)  # type: ignore[arg-type]
    link._client = Client(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    asked, _ = made(link)
    answer = asyncio.create_task(asked.complete(params(INVOKED, 4)))
    await asyncio.sleep(0)
    say(live, 1, "one two thr")
    async with asyncio.timeout(20):
        assert [item.insert_text for item in await answer] == ["one two"]
    ended.set()
    await link._client.close()
    server.close()


async def test_outcomes_are_reported_in_order_though_one_fails() -> None:
    reported: list[str] = []

    async def report(suggestion_id: str, outcome: str) -> None:
        await asyncio.sleep(0.02 if suggestion_id == "slow" else 0.0)
        reported.append(f"{suggestion_id} {outcome}")
        if suggestion_id == "bad":
            raise ValueError("a defect")

    outcomes = Outcomes(report)
    for name in ("slow", "bad", "last"):
        outcomes.given(name, "text", 0)
        outcomes.shown(name)
    outcomes.accepted("last")
    await outcomes.settle()
    assert reported == ["slow shown", "bad shown", "last shown", "last accepted"]
