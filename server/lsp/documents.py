"""An editor's settings and open documents: their texts, their names in the project, and which of them may be sent."""

from __future__ import annotations

import itertools
import re
import time
from bisect import bisect_right
from collections import deque
from collections.abc import Iterable, Sequence
from enum import StrEnum
from fnmatch import fnmatchcase
from typing import Annotated, Any, Literal, NamedTuple
from urllib.parse import unquote

from lsprotocol import types
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2


def plain(value: Any) -> Any:
    """Named tuples, which pygls makes of objects it knows no type for, as dicts, all the way down."""
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {name: plain(field) for name, field in value._asdict().items()}
    if isinstance(value, dict):
        return {name: plain(field) for name, field in value.items()}
    if isinstance(value, list | tuple):
        return [plain(field) for field in value]
    return value


SECTION = "specdec"
_SECRETS = (".env", ".env.*", "*.pem", "*.key", "id_rsa", "id_ed25519")


class Settings(BaseModel):
    """Names are camelCase on the wire. Unknown ones are ignored: editors send more than is meant for us.

    ``mode``: suggest while the user types and when asked to, only when asked to, or never. ``fill``: fill in or be
    refused where the model cannot; else continue what is in front of the cursor there; or do that in any case.
    ``max_prompt_tokens`` None: the server's default. ``context_files``, ``context_characters``: of other documents.
    ``exclude``: names of files that are neither completed nor shown to the model. ``indexes``: the server's to draft
    from; none named: all that it allows.
    """

    model_config = ConfigDict(alias_generator=to_camel, frozen=True, extra="ignore", strict=True)

    mode: Literal["auto", "manual", "off"] = "auto"
    debounce_ms: Annotated[float, Field(ge=0, le=10_000)] = 10.0
    max_lines: Annotated[int, Field(ge=1, le=1000)] | None = 12
    max_tokens: Annotated[int, Field(ge=1, le=4096)] = 96
    time_limit_ms: Annotated[float, Field(gt=0, le=600_000)] | None = 2000.0
    max_prompt_tokens: Annotated[int, Field(ge=64)] | None = None
    fill: Literal["middle", "middle_or_prefix", "prefix"] = "middle_or_prefix"
    speculation: Literal["auto", "on", "off"] = "auto"
    context_files: Annotated[int, Field(ge=0, le=64)] = 6
    context_characters: Annotated[int, Field(ge=0, le=1 << 20)] = 6000
    exclude: Annotated[tuple[str, ...], Field(strict=False)] = _SECRETS
    disabled_languages: Annotated[tuple[str, ...], Field(strict=False)] = ()
    model: str = ""
    cache_salt: str = ""
    indexes: Annotated[tuple[str, ...], Field(strict=False)] = ()


def read_settings(told: Any, former: Settings | None = None) -> tuple[Settings, list[str]]:
    """Settings as an editor tells them, alone or under "specdec", and what is wrong with them; what is wrong or not
    told is as in ``former`` (None: the defaults)."""
    values = dict(told) if isinstance(told, dict) else {}
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


class PositionEncoding(StrEnum):
    """As editors and servers agree on it at the begin: bytes, 16-bit units, or code points."""

    UTF8 = "utf-8"
    UTF16 = "utf-16"
    UTF32 = "utf-32"

    def place_in(self, text: str, units: int) -> int:
        """The index in ``text`` that lies ``units`` behind its begin; beyond the end it is the end, inside of a
        character that character's begin. ``text`` holds no lone surrogates."""
        units = max(0, units)
        if self is PositionEncoding.UTF32 or text.isascii():
            return min(units, len(text))
        codec, width = ("utf-8", 1) if self is PositionEncoding.UTF8 else ("utf-16-le", 2)
        return len(text.encode(codec)[: units * width].decode(codec, "ignore"))


_LINE_END = re.compile(r"\r\n|\n|\r")
_LONE_SURROGATE = re.compile("[\ud800-\udfff]")


class SyncedText:
    """``text``, and where its lines begin. Lines end as LSP says: at ``\\n``, ``\\r\\n`` or ``\\r``. Half a surrogate
    pair, which no other side could be told of, is kept as U+FFFD, which counts as much."""

    def __init__(self, text: str, encoding: PositionEncoding) -> None:
        self.text, self._encoding = whole_characters(text), encoding
        self._starts = [0, *(found.end() for found in _LINE_END.finditer(self.text))]

    @property
    def n_lines(self) -> int:
        """How many lines there are; the last may be empty."""
        return len(self._starts)

    def place(self, line: int, character: int) -> int:
        """The index of a position. One behind its line's last character is the line's end, one behind the last line
        the text's."""
        if line >= len(self._starts):
            return len(self.text)
        start = self._starts[max(0, line)]
        end = self._starts[line + 1] if line + 1 < len(self._starts) else len(self.text)
        shown = self.text[start:end].rstrip("\r\n")
        return start + self._encoding.place_in(shown, character)

    def replace(self, start: int, end: int, text: str) -> None:
        """Put ``text`` into the place of what lies between two indices."""
        starts = self._starts
        # Lines are found anew from the one before, whose end may be half of what is now one line end.
        first = max(0, bisect_right(starts, start) - 2)
        last = bisect_right(starts, end)
        new = whole_characters(text)
        grown = len(new) - (end - start)
        self.text = self.text[:start] + new + self.text[end:]
        stop = starts[last] + grown if last < len(starts) else len(self.text)
        begun = starts[first]
        found = [m.end() for m in _LINE_END.finditer(self.text, begun, stop)]
        starts[first + 1 :] = [*found, *(place + grown for place in starts[last + 1 :])]


def whole_characters(text: str) -> str:
    """``text`` with half surrogate pairs replaced."""
    return text if text.isascii() else _LONE_SURROGATE.sub("\ufffd", text)


class BeyondDocumentError(ValueError):
    """A position in a line, from 0, that a document of so many lines does not have. A character behind a line's end is
    none: LSP has it mean that end."""

    def __init__(self, line: int, n_lines: int) -> None:
        lines = "1 line" if n_lines == 1 else f"{n_lines} lines"
        super().__init__(f"position.line: {line} is beyond the document, which has {lines} here (counted from 0)")


LOGGED = 256  # edits after which the whole text is sent instead
_REVISIONS = itertools.count(1)


class _Logged(NamedTuple):
    revision: int  # what the edit led to
    edit: pb.TextEdit


class OpenDocument:
    """``name``: what the server and the model know it by. ``revision``: names this very text; no other text of this
    process has it, so that a server that holds it holds this text, even after the document was closed and opened.
    ``used_ms``: when it was last changed or asked for, Unix time. ``touched``: index of the last change or ask."""

    def __init__(self, uri: str, name: str, language: str, text: str, encoding: PositionEncoding) -> None:
        self.uri, self.name, self.language = uri, name, language
        self._encoding = encoding
        self._content = SyncedText(text, encoding)
        self._log: deque[_Logged] = deque(maxlen=LOGGED)
        self.revision = self._log_from = next(_REVISIONS)
        self.touched = 0
        self.used_ms = _now_ms()

    @property
    def text(self) -> str:
        """All of it."""
        return self._content.text

    def place(self, position: types.Position) -> int:
        """The index of a position."""
        return self._content.place(position.line, position.character)

    def apply(self, changes: Iterable[types.TextDocumentContentChangeEvent]) -> None:
        """Follow the editor, change by change."""
        for change in changes:
            if isinstance(change, types.TextDocumentContentChangePartial):
                start = self.place(change.range.start)
                end = max(start, self.place(change.range.end))
                self._replace(start, end, change.text)
            else:
                self._content = SyncedText(change.text, self._encoding)
                self._log.clear()
                self.revision = self._log_from = next(_REVISIONS)
        self.used_ms = _now_ms()

    def edits_since(self, revision: int | None) -> Sequence[pb.TextEdit] | None:
        """What leads from a revision to this one, offsets in code points; None: it is better to send the text."""
        if revision == self.revision:
            return ()
        if revision is None or revision < self._log_from:
            return None
        edits = [logged.edit for logged in self._log if logged.revision > revision]
        return edits if sum(len(edit.text) for edit in edits) < len(self.text) else None

    def ask_at(self, position: types.Position) -> int:
        """The index of a position at which a completion is wanted.

        Raises:
            BeyondDocumentError: there is no such line.
        """
        if position.line >= self._content.n_lines:
            raise BeyondDocumentError(position.line, self._content.n_lines)
        self.touched, self.used_ms = self.place(position), _now_ms()
        return self.touched

    def excerpt(self, characters: int) -> str:
        """Whole lines around the place that was touched last, more of those in front of it. It stays what it is for as
        long as nobody works in the document, so that prompts begin alike."""
        if len(self.text) <= characters:
            return self.text
        start = max(0, min(self.touched - characters * 2 // 3, len(self.text) - characters))
        if start:
            start = self.text.find("\n", start - 1, start + characters) + 1 or start
        end = min(len(self.text), start + characters)
        if end < len(self.text):
            end = self.text.rfind("\n", start, end) + 1 or end
        return self.text[start:end]

    def _replace(self, start: int, end: int, text: str) -> None:
        self._content.replace(start, end, text)
        if len(self._log) == LOGGED:
            self._log_from = self._log[0].revision
        self.revision = next(_REVISIONS)
        edit = pb.TextEdit(start=start, end=end, text=self.text[start : start + len(text)])
        self._log.append(_Logged(self.revision, edit))
        self.touched = start + len(text)


def _now_ms() -> int:
    return time.time_ns() // 1_000_000


class Project:
    """Documents are known by their paths in the project: prompts read better, and nobody learns where a user keeps
    things."""

    def __init__(self, folders: Iterable[types.WorkspaceFolder] = ()) -> None:
        self._folders = list(folders)

    def change(self, added: Sequence[types.WorkspaceFolder], removed: Sequence[types.WorkspaceFolder]) -> None:
        """Folders come and go."""
        gone = {folder.uri for folder in removed}
        self._folders = [folder for folder in self._folders if folder.uri not in gone] + list(added)

    def name_of(self, uri: str) -> str:
        """A document's path in its folder, behind the folder's name where several are open; its file's name where it
        is in none."""
        folder = self._folder_of(uri)
        if folder is None:
            return unquote(uri.rstrip("/").rpartition("/")[2]) or uri
        path = unquote(uri[len(folder.uri.rstrip("/")) + 1 :])
        return f"{folder.name}/{path}" if len(self._folders) > 1 else path

    def repository_of(self, uri: str) -> str:
        """The name of a document's folder; empty where it is in none."""
        folder = self._folder_of(uri)
        return "" if folder is None else folder.name

    def _folder_of(self, uri: str) -> types.WorkspaceFolder | None:
        inside = [folder for folder in self._folders if uri.startswith(folder.uri.rstrip("/") + "/")]
        return max(inside, key=lambda folder: len(folder.uri), default=None)


def folders_of(params: types.InitializeParams) -> list[types.WorkspaceFolder]:
    """The folders an editor begins with, in whichever way it tells them."""
    if params.workspace_folders:
        return list(params.workspace_folders)
    if params.root_uri:
        return [types.WorkspaceFolder(params.root_uri, unquote(params.root_uri.rstrip("/").rpartition("/")[2]))]
    return []


class DocumentTable:
    """By URI. What an editor says of documents that it has not opened is ignored."""

    def __init__(self, project: Project, encoding: PositionEncoding) -> None:
        self.project, self._encoding = project, encoding
        self._documents: dict[str, OpenDocument] = {}

    def open(self, item: types.TextDocumentItem) -> OpenDocument:
        """A document is there, or there anew."""
        self._documents.pop(item.uri, None)
        name = self.project.name_of(item.uri)
        taken = {document.name for document in self._documents.values()}
        name = next(n for n in (name, *(f"{i}/{name}" for i in range(2, len(taken) + 3))) if n not in taken)
        found = OpenDocument(item.uri, name, item.language_id, item.text, self._encoding)
        self._documents[item.uri] = found
        return found

    def get(self, uri: str) -> OpenDocument | None:
        """An open document."""
        return self._documents.get(uri)

    def close(self, uri: str) -> OpenDocument | None:
        """Forget a document; the one it was."""
        return self._documents.pop(uri, None)

    def beside(self, document: OpenDocument, settings: Settings) -> list[options_pb2.ContextFile]:
        """Parts of the other documents, those used last first, as far as ``settings`` leave room."""
        others = [o for o in self._documents.values() if o is not document and o.text and not secret(o.name, settings)]
        others.sort(key=lambda other: other.used_ms, reverse=True)
        found: list[options_pb2.ContextFile] = []
        left = settings.context_characters
        for i, other in enumerate(others[: settings.context_files]):
            # What is used less gets less, but all of what the others left.
            text = other.excerpt(left if i + 1 == len(others) else left // 2 or left)
            if not text:
                break
            found.append(options_pb2.ContextFile(filename=other.name, text=text, time_ms=other.used_ms))
            left -= len(text)
        return found


def secret(name: str, settings: Settings) -> bool:
    """Whether a document's file name is one of those that no model is shown."""
    file = name.rpartition("/")[2]
    return any(fnmatchcase(file, pattern) for pattern in settings.exclude)
