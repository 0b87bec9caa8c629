"""An editor's settings and open documents: their texts, their names in the project, and which of them may be sent."""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal
from urllib.parse import unquote

from lsprotocol import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel
from pygls.exceptions import JsonRpcInvalidParams

from server.completion.documents import OffsetUnit
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2

SECTION = "specdec"
_SECRETS = [".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519"]


class Settings(BaseModel):
    """Names are camelCase on the wire. Unknown names are ignored, because editors send settings of others too."""

    model_config = ConfigDict(alias_generator=to_camel, frozen=True, extra="ignore", strict=True)

    mode: Literal["auto", "manual", "off"] = "auto"  # suggest while typing, only on request, never
    debounce_ms: Annotated[float, Field(ge=0, le=10_000)] = 10.0
    max_lines: Annotated[int, Field(ge=1, le=1000)] | None = 12
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 96
    time_limit_ms: Annotated[float, Field(gt=0, le=600_000)] | None = 2000.0
    max_prompt_tokens: Annotated[int, Field(ge=64, le=2**31 - 1)] | None = None  # None: the server's default
    # Objective of time to first token; a slow server shows the model less text, and reads ahead while the user pauses.
    ttft_ms: Annotated[float, Field(ge=0, le=600_000)] = 400.0  # 0: none
    # Fill in, or be refused by models that cannot; continue the prefix with such models; always continue the prefix.
    fill: Literal["middle", "middle_or_prefix", "prefix"] = "middle_or_prefix"
    speculation: Literal["auto", "on", "off"] = "auto"
    context_files: Annotated[int, Field(ge=0, le=64)] = 6  # other open documents in the prompt
    context_characters: Annotated[int, Field(ge=0, le=1 << 20)] = 6000
    exclude: list[str] = _SECRETS  # file names that are never sent
    disabled_languages: list[str] = []
    next_edits: bool = True
    edit_model: str = ""  # predicts edits; empty: ``model``, if it is trained to
    model: str = ""
    cache_salt: str = ""
    indexes: list[str] = []  # of the server, to draft from; empty: all allowed


def read_settings(given: Any, former: Settings | None = None) -> tuple[Settings, list[str]]:
    """The settings that an editor sends, with or without the "specdec" section, and their problems. Invalid or missing
    ones keep their value in ``former`` (None: the defaults)."""
    values = dict(given) if isinstance(given, dict) else {}
    if isinstance(values.get(SECTION), dict):
        values = values[SECTION]
    base = {} if former is None else former.model_dump(by_alias=True)
    try:
        return Settings.model_validate(base | values), []
    except ValidationError as error:
        found = error.errors()
        bad = {str(problem["loc"][0]) for problem in found}
        problems = [f"{SECTION}.{'.'.join(map(str, problem['loc']))}: {problem['msg']}" for problem in found]
        return Settings.model_validate(base | {name: v for name, v in values.items() if name not in bad}), problems


_LINE_END = re.compile(r"\r\n|\n|\r")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SyncedText:
    r"""A text and where its lines start, which end at ``\n``, ``\r\n`` or ``\r`` as LSP defines. A lone surrogate,
    which cannot be transmitted, becomes U+FFFD, which has the same length.

    The lines behind a change are kept by their distance from the text's end, which no change before them moves. Without
    that, a message that changes every line of a long text takes as many passes over all lines. Each change copies the
    text.
    """

    def __init__(self, text: str, unit: OffsetUnit) -> None:
        self.text, self._unit = whole_characters(text), unit
        self._starts = [0, *(found.end() for found in _LINE_END.finditer(self.text))]
        self._behind = list[int]()  # distances of further lines' starts from the text's end, last line first

    @property
    def n_lines(self) -> int:
        """Number of lines; the last may be empty."""
        return len(self._starts) + len(self._behind)

    def place(self, line: int, character: int) -> int:
        """The index of a position, clipped to the line's end, and beyond the last line to the text's end."""
        if line >= self.n_lines:
            return len(self.text)
        line, starts = max(0, line), self._starts
        if (missing := line + 2 - len(starts)) > 0:
            starts += [len(self.text) - distance for distance in self._behind[: -missing - 1 : -1]]
            del self._behind[-missing:]
        end = starts[line + 1] if line + 1 < len(starts) else len(self.text)
        shown = self.text[starts[line] : end].rstrip("\r\n")
        return starts[line] + self._unit.place_in(shown, character)

    def position(self, place: int) -> types.Position:
        line = self._line_of(place)
        return types.Position(line, self._unit.units_of(self.text[self._starts[line] : place]))

    def replace(self, start: int, end: int, text: str) -> None:
        behind, new, starts = self._line_of(end) + 1, whole_characters(text), self._starts
        self._behind += [len(self.text) - each for each in starts[: behind - 1 : -1]]
        # The line before is searched again: its \r may now be followed by \n.
        del starts[max(1, self._line_of(start)) :]
        self.text = "".join((self.text[:start], new, self.text[end:]))
        stop = len(self.text) - self._behind.pop() if self._behind else len(self.text)
        starts.extend(found.end() for found in _LINE_END.finditer(self.text, starts[-1], stop))

    def _line_of(self, place: int) -> int:
        while self._behind and len(self.text) - self._behind[-1] <= place:
            self._starts.append(len(self.text) - self._behind.pop())
        return bisect_right(self._starts, place) - 1


def whole_characters(text: str) -> str:
    """``text`` with lone surrogates replaced."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


class BeyondDocumentError(JsonRpcInvalidParams):
    """A position's line, from 0, is not in the document. A character beyond a line's end is valid: LSP clips it."""

    def __init__(self, line: int, n_lines: int) -> None:
        lines = "1 line" if n_lines == 1 else f"{n_lines} lines"
        super().__init__(f"position.line: {line} is beyond the document, which has {lines} here (counted from 0)")


LOGGED = 256  # edits; a server that is further behind gets the whole text
_REVISIONS = itertools.count(1)


class OpenDocument:
    """A document of the editor, with the log of its recent edits."""

    def __init__(self, uri: str, name: str, language: str, text: str, unit: OffsetUnit) -> None:
        self.uri, self.language = uri, language
        self.name = name  # for the server and the model
        self._unit = unit
        self._content = SyncedText(text, unit)
        self._log: deque[tuple[int, pb.TextEdit]] = deque(maxlen=LOGGED)  # (revision before the edit, edit)
        # Identifies this very text in the process, so a server's copy stays valid after the document is reopened.
        self.revision = next(_REVISIONS)
        self.touched = 0  # index of the last change or completion
        self.use()

    @property
    def text(self) -> str:
        return self._content.text

    def use(self) -> None:
        """The user looks at it."""
        self.used_ms = time.time_ns() // 1_000_000  # Unix time

    def place(self, position: types.Position) -> int:
        return self._content.place(position.line, position.character)

    def range_of(self, start: int, end: int) -> types.Range:
        return types.Range(self._content.position(start), self._content.position(end))

    def apply(self, changes: Iterable[types.TextDocumentContentChangeEvent]) -> None:
        for change in changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start = self.place(change.range.start)
                end = max(start, self.place(change.range.end))
                self._content.replace(start, end, change.text)
                self.touched = start + len(change.text)
                edit = pb.TextEdit(start=start, end=end, text=self.text[start : self.touched])
                self._log.append((self.revision, edit))
            else:
                self._content = SyncedText(change.text, self._unit)
                self._log.clear()
                self.touched = min(self.touched, len(self.text))
            self.revision = next(_REVISIONS)
        self.use()

    def edits_since(self, revision: int | None) -> Sequence[pb.TextEdit] | None:
        """The edits from a revision to the current one, offsets in code points; None: sending the text is shorter."""
        if revision == self.revision:
            return ()
        if revision is None or all(before != revision for before, _ in self._log):
            return None
        edits = [edit for before, edit in self._log if before >= revision]
        return edits if sum(len(edit.text) for edit in edits) < len(self.text) else None

    def completed_at(self, position: types.Position) -> int:
        """The index of a position to complete at.

        Raises:
            BeyondDocumentError: there is no such line.
        """
        if position.line >= self._content.n_lines:
            raise BeyondDocumentError(position.line, self._content.n_lines)
        self.touched = self.place(position)
        self.use()
        return self.touched

    def excerpt(self, characters: int) -> str:
        """Whole lines around the last touched place, two thirds of them before it. It is stable while the document is
        idle, so that prompts share a prefix."""
        if len(self.text) <= characters:
            return self.text
        start = max(0, min(self.touched - characters * 2 // 3, len(self.text) - characters))
        if start:
            start = self.text.find("\n", start - 1, start + characters) + 1 or start
        end = min(len(self.text), start + characters)
        if end < len(self.text):
            end = self.text.rfind("\n", start, end) + 1 or end
        return self.text[start:end]


class Project:
    """Names documents by their paths in the project: better for prompts, and the user's directories stay private."""

    def __init__(self, folders: Iterable[types.WorkspaceFolder] = ()) -> None:
        self._folders = list(folders)

    def change(self, event: types.WorkspaceFoldersChangeEvent) -> None:
        gone = {folder.uri for folder in event.removed}
        self._folders = [folder for folder in self._folders if folder.uri not in gone] + list(event.added)

    def name_of(self, uri: str) -> str:
        """A document's path in its folder, after the folder's name if several are open; the bare file name outside of
        all folders."""
        uri, folder = _file_of(uri), self._folder_of(uri)
        if folder is None:
            return unquote(uri.rstrip("/").rpartition("/")[2]) or uri
        path = unquote(uri[len(folder.uri.rstrip("/")) + 1 :])
        return f"{folder.name}/{path}" if len(self._folders) > 1 else path

    def repository_of(self, uri: str) -> str:
        """The name of a document's folder; empty outside of all folders."""
        folder = self._folder_of(uri)
        return "" if folder is None else folder.name

    def _folder_of(self, uri: str) -> types.WorkspaceFolder | None:
        inside = [folder for folder in self._folders if _file_of(uri).startswith(folder.uri.rstrip("/") + "/")]
        return max(inside, key=lambda folder: len(folder.uri), default=None)


def _file_of(uri: str) -> str:
    """``uri`` without a query, such as VS Code's of git; or that of the notebook for one of its cells."""
    uri = uri if uri.startswith("file:") else uri.partition("?")[0]  # in a file's, `?` is part of its name
    scheme, _, path = uri.partition("#")[0].partition(":")
    if scheme != "vscode-notebook-cell":
        return uri
    return f"vscode-remote:{path}" if path.startswith("//") else f"file://{path}"


def folders_of(params: types.InitializeParams) -> list[types.WorkspaceFolder]:
    """The initial workspace folders, from any of LSP's fields for them."""
    if params.workspace_folders:
        return list(params.workspace_folders)
    if params.root_uri:
        return [types.WorkspaceFolder(params.root_uri, unquote(params.root_uri.rstrip("/").rpartition("/")[2]))]
    return []


class DocumentTable(dict[str, OpenDocument]):
    """Open documents by URI. Messages about others are ignored."""

    def __init__(self, project: Project, unit: OffsetUnit) -> None:
        super().__init__()
        self.project, self._unit = project, unit

    def open(self, item: types.TextDocumentItem) -> OpenDocument:
        self.pop(item.uri, None)
        name = self.project.name_of(item.uri)
        taken = {document.name for document in self.values()}
        name = next(n for n in (name, *(f"{i}/{name}" for i in range(2, len(taken) + 3))) if n not in taken)
        found = self[item.uri] = OpenDocument(item.uri, name, item.language_id, item.text, self._unit)
        return found

    def beside(self, document: OpenDocument, settings: Settings) -> list[options_pb2.ContextFile]:
        """Excerpts of the other documents, last used first, within the limits of ``settings``."""
        others = [o for o in self.values() if o is not document and o.text and not secret(o.name, settings)]
        others = sorted(others, key=lambda other: other.used_ms, reverse=True)[: settings.context_files]
        found: list[options_pb2.ContextFile] = []
        left = settings.context_characters
        for i, other in enumerate(others):
            # Each gets half of the remaining characters, the last one all of them.
            text = other.excerpt(left if i + 1 == len(others) else left // 2 or left)
            if not text:
                break
            found.append(options_pb2.ContextFile(filename=other.name, text=text, time_ms=other.used_ms))
            left -= len(text)
        return found


def may_suggest(document: OpenDocument, settings: Settings) -> bool:
    """Whether the settings allow suggestions in a document."""
    return (
        settings.mode != "off"
        and document.language not in settings.disabled_languages
        and not secret(document.name, settings)
    )


def secret(name: str, settings: Settings) -> bool:
    """Whether a document's file name matches `exclude`."""
    file = name.rpartition("/")[2]
    return any(fnmatchcase(file, pattern) for pattern in settings.exclude)
