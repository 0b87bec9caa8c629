"""Which parts of other documents the model is shown, under which names, and which settings hold."""

from __future__ import annotations

from lsprotocol import types

from server.completion.documents import OffsetUnit
from server.lsp.documents import (
    DocumentTable,
    OpenDocument,
    Project,
    Settings,
    folders_of,
    read_settings,
)
from server.lsp.session import setup_of

ONE, TWO = (types.WorkspaceFolder(f"file:///home/someone/{name}", name) for name in ("one", "two"))


def opened(*texts: str, project: Project | None = None) -> tuple[DocumentTable, list[OpenDocument]]:
    """Documents a0.py, a1.py, ... of the folder "one", each used later than the one before."""
    table = DocumentTable(project or Project([ONE]), OffsetUnit.UTF16)
    documents = [table.open(types.TextDocumentItem(f"{ONE.uri}/a{i}.py", "python", 1, t)) for i, t in enumerate(texts)]
    for i, document in enumerate(documents):
        document.used_ms = i
    return table, documents


def test_recently_used_texts_come_first_within_the_budget() -> None:
    table, documents = opened("a\n" * 40, "b\n" * 40, "", "c\n" * 40, "asked for")
    found = table.beside(documents[-1], Settings(contextCharacters=100))
    assert [(f.filename, f.text, f.time_ms) for f in found] == [
        ("a3.py", "c\n" * 25, 3), ("a1.py", "b\n" * 12, 1), ("a0.py", "a\n" * 13, 0),
    ]  # fmt: skip
    (only,) = table.beside(documents[-1], Settings(contextFiles=1, contextCharacters=60))
    assert (only.filename, only.text) == ("a3.py", "c\n" * 30)
    assert table.beside(documents[-1], Settings(contextFiles=0)) == []
    assert table.beside(documents[-1], Settings(contextCharacters=0)) == []


def test_secrets_are_not_shown() -> None:
    table, documents = opened("asked for")
    names = (".env", "deep/.env.local", "server.pem", "environment.py", "what?.pem")  # some editors may not encode `?`
    for uri in (*(f"{ONE.uri}/{name}" for name in names), "git:/one/.env?%7B%22ref%22%3A%22~%22%7D"):
        table.open(types.TextDocumentItem(uri, "text", 1, "text"))
    assert [f.filename for f in table.beside(documents[0], Settings())] == ["environment.py"]


def test_names_reveal_nothing_above_the_project() -> None:
    project = Project([ONE])
    assert project.name_of(f"{ONE.uri}/src/a%20b.py") == "src/a b.py"
    assert project.repository_of(f"{ONE.uri}/src/a.py") == "one"
    assert (project.name_of("file:///etc/hosts"), project.repository_of("file:///etc/hosts")) == ("hosts", "")
    assert project.name_of("untitled:Untitled-1") == "untitled:Untitled-1"
    cell = ONE.uri.replace("file://", "vscode-notebook-cell:") + "/src/a.ipynb#W0sZmlsZQ%3D%3D"
    assert (project.name_of(cell), project.repository_of(cell)) == ("src/a.ipynb", ONE.name)
    assert project.name_of("vscode-notebook-cell:/etc/b.ipynb#W1s") == "b.ipynb"
    far = types.WorkspaceFolder("vscode-remote://host/home/c", "c")
    assert Project([far]).name_of("vscode-notebook-cell://host/home/c/d.ipynb#W1s") == "d.ipynb"
    project.change(types.WorkspaceFoldersChangeEvent(added=[TWO], removed=[]))
    assert project.name_of(f"{TWO.uri}/a.py") == "two/a.py"
    project.change(types.WorkspaceFoldersChangeEvent(added=[], removed=[ONE]))
    assert project.name_of(f"{TWO.uri}/a.py") == "a.py"


def test_two_documents_never_share_a_name() -> None:
    table, _ = opened("text")
    other = table.open(types.TextDocumentItem("file:///elsewhere/a0.py", "python", 1, "other"))
    third = table.open(types.TextDocumentItem("file:///nowhere/a0.py", "python", 1, "third"))
    assert (other.name, third.name) == ("2/a0.py", "3/a0.py")


def test_workspace_folders_in_every_form() -> None:
    capabilities = types.ClientCapabilities()
    assert folders_of(types.InitializeParams(capabilities)) == []
    assert folders_of(types.InitializeParams(capabilities, root_uri=ONE.uri)) == [ONE]
    assert folders_of(types.InitializeParams(capabilities, root_uri=ONE.uri, workspace_folders=[TWO])) == [TWO]


def test_settings_are_parsed_field_by_field() -> None:
    settings, problems = read_settings({"specdec": {"maxLines": 3, "unknown": 1, "exclude": ["*.txt"]}})
    assert (settings.max_lines, settings.exclude, problems) == (3, ["*.txt"], [])
    settings, problems = read_settings({"maxLines": "many", "timeLimitMs": None, "maxTokens": 7}, settings)
    assert (settings.max_lines, settings.time_limit_ms, settings.max_tokens) == (3, None, 7)
    assert len(problems) == 1
    assert problems[0].startswith("specdec.maxLines")
    for tokens, found in ((2**31 - 1, 2**31 - 1), (2**31, None)):  # what a message can hold
        settings, problems = read_settings({"maxPromptTokens": tokens})
        assert (settings.max_prompt_tokens, len(problems)) == (found, found is None)
    _, problems = read_settings({"exclude": "*.txt"})
    assert problems == ["specdec.exclude: Input should be a valid list"]
    for nothing in (None, [], "text", 5):
        assert read_settings(nothing) == (Settings(), [])


def test_settings_choose_the_sources_of_drafts() -> None:
    settings, problems = read_settings({"specdec": {"indexes": ["project", "library"]}})
    assert not problems
    assert list(setup_of(settings, "s").speculation.indexes) == ["project", "library"]
    assert not setup_of(Settings(), "s").speculation.indexes
