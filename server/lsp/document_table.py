"""The documents that are open in the editor."""

from __future__ import annotations

from fnmatch import fnmatchcase

from lsprotocol import types

from server.lsp.open_document import OpenDocument
from server.lsp.position_encoding import PositionEncoding
from server.lsp.project import Project
from server.lsp.settings import Settings
from specdec.api.v1 import options_pb2


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
