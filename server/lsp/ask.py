"""What a completion is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from server.completion.text_document import MAX_CHARACTERS, TextDocument
from server.lsp.open_document import OpenDocument
from specdec.api.v1 import options_pb2


@dataclass(frozen=True, slots=True)
class Ask:
    """At index ``place`` of ``document`` as of ``revision``. ``selected``: what the editor's menu would put into the
    place of what lies between two indices; the completion is to follow that. ``extra``: other texts of the project."""

    document: OpenDocument
    revision: int
    place: int
    selected: tuple[int, int, str] | None = None
    extra: tuple[options_pb2.ContextFile, ...] = ()
    repository: str = ""

    @property
    def by_cursor(self) -> bool:
        """Whether a place in the document says it all, so that the server's copy of it can be used."""
        return self.selected is None and len(self.document.text) <= MAX_CHARACTERS

    def gap(self) -> options_pb2.FimPrompt:
        """The texts around the place, cut as the server cuts its copy: a generation goes on from one to the other."""
        text, place = self.document.text, self.place
        if self.selected is not None:
            start, end, menu = self.selected
            text, place = text[:start] + menu + text[end:], start + len(menu)
        prefix, suffix = TextDocument(text, 0).around(place)
        return options_pb2.FimPrompt(
            prefix=prefix, suffix=suffix, file_name=self.document.name, language=self.document.language,
            extra=self.extra, repo_name=self.repository,
        )  # fmt: skip
