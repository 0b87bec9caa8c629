"""The field ``segments``: what stands around a cursor, and other texts of the project."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from server.completion.context_file import ContextFile
from server.completion.gap import Gap
from server.http.body import Body
from server.http.tabby.line_ends import LineEnds

# Lists of texts, the most relevant kind first, and whether the client ranks the texts in them.
_KINDS = (
    ("declarations", False),
    ("relevant_snippets_from_changed_files", True),
    ("relevant_snippets_from_recently_opened_files", True),
)
CLIPBOARD = "clipboard"


@dataclass(frozen=True, slots=True)
class Segments:
    """``gap`` has plain line feeds; ``snippets``: the texts beside it, as Tabby tells them."""

    gap: Gap
    ends: LineEnds
    snippets: tuple[dict[str, Any], ...]


def read_segments(given: Body, language: str) -> Segments:
    """Tabby's own fields; a text without a body says nothing, and is left out."""
    prefix, suffix = given.text("prefix"), given.text("suffix") or ""
    if prefix is None:
        given.refuse("prefix", "must be a string")
    ends = LineEnds(prefix or "", suffix)
    files = tuple(_files(given, ends))
    gap = Gap(
        prefix=ends.plain(prefix or ""),
        suffix=ends.plain(suffix),
        files=files,
        repo=_repository(given.text("git_url") or ""),
        path=given.text("filepath") or "",
        language=language,
    )
    return Segments(gap, ends, tuple({"filepath": f.name, "body": f.text, "score": f.score} for f in files))


def _files(given: Body, ends: LineEnds) -> Iterator[ContextFile]:
    """Scores put kinds apart: each has a whole number of its own, to which the client's score adds at most a half."""
    for base, (kind, ranked) in enumerate(reversed(_KINDS), start=1):
        for item in given.objects(kind):
            name, text = item.text("filepath") or "", item.text("body") or ""
            score = (item.number("score") or 0.0) if ranked else 0.0
            if text.strip():
                yield ContextFile(name, ends.plain(text), base + 0.5 * max(0.0, score) / (1 + abs(score)))
    clipboard = given.text(CLIPBOARD) or ""
    if clipboard.strip():
        yield ContextFile(CLIPBOARD, ends.plain(clipboard))


def _repository(url: str) -> str:
    """The project's name, without where it is kept."""
    return url.rstrip("/").removesuffix(".git").replace(":", "/").rpartition("/")[2]
