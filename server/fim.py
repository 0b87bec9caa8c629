"""Fill-in-the-middle: documents that an editor changes, a gap in one, and the prompt that fills it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from specdec.errors import RequestError, ViolationCollector

MAX_CHARACTERS = 1 << 21
CHARACTERS_BEFORE, CHARACTERS_BEHIND = 1 << 17, 1 << 15  # characters around a place that are looked at
BEFORE_STEP = 1 << 14


class OffsetUnit(StrEnum):
    """What offsets count: Unicode code points, 16-bit units as JavaScript and Java have them, or bytes."""

    CODE_POINT = "code_point"
    UTF16 = "utf16"
    UTF8 = "utf8"


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Puts ``text`` in the place of what lies between two offsets."""

    start: int
    end: int
    text: str


class TextDocument:
    """``text`` as of ``version``; ``language`` as editors name it."""

    __slots__ = ("language", "text", "version")

    def __init__(self, text: str, version: int, language: str = "") -> None:
        self.text, self.version, self.language = text, version, language

    def apply(self, edits: Sequence[TextEdit], version: int, unit: OffsetUnit, field: str = "edits") -> None:
        """Change the text by each edit in turn, all or none.

        Raises:
            InvalidRequestError: an edit lies outside of the text, or it would grow too long.
        """
        text, violations = self.text, ViolationCollector()
        for i, edit in enumerate(edits):
            start, end = (place_of(text, offset, unit) for offset in (edit.start, edit.end))
            ok = start is not None and end is not None and start <= end
            violations.check(ok, f"{field}[{i}]", "start and end must lie in the text, in order, between characters")
            violations.raise_if_any()
            assert start is not None
            assert end is not None
            text = text[:start] + edit.text + text[end:]
        check_length(text, field, violations)
        violations.raise_if_any()
        self.text, self.version = text, version

    def around(self, place: int) -> tuple[str, str]:
        """What stands before and behind an index. Of a long text it is as much as can matter, with a begin that stays
        while the place moves on."""
        start = max(0, place - CHARACTERS_BEFORE) // BEFORE_STEP * BEFORE_STEP
        return self.text[start:place], self.text[place : place + CHARACTERS_BEHIND]


def check_length(text: str, field: str, violations: ViolationCollector) -> None:
    """Tell ``violations`` of a text that is too long to be kept."""
    violations.check(
        len(text) <= MAX_CHARACTERS, field, f"a document may have {MAX_CHARACTERS} characters, got {len(text)}"
    )


def place_of(text: str, offset: int, unit: OffsetUnit) -> int | None:
    """``offset`` as an index; None where there is no such place, or it is inside of a character."""
    if unit is OffsetUnit.CODE_POINT or text.isascii():
        return offset if 0 <= offset <= len(text) else None
    encoding, width = ("utf-16-le", 2) if unit is OffsetUnit.UTF16 else ("utf-8", 1)
    data = text.encode(encoding, "surrogatepass")
    if not 0 <= offset * width <= len(data):
        return None
    try:
        return len(data[: offset * width].decode(encoding))
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file or a part of one. ``score``: how relevant, ``time_ms``: when it was last looked at or changed."""

    name: str
    text: str
    score: float = 0.0
    time_ms: int = 0


class FillMode(StrEnum):
    """What to do about the text behind the gap."""

    MIDDLE = "middle"
    MIDDLE_OR_PREFIX = "middle_or_prefix"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Gap:
    """What fill-in-the-middle fills: the texts before and after a cursor, and where they come from.

    ``head_from``: offset in ``prefix`` of what the model is shown as the begin of what it fills in; None: as suits
    prefix hits best.
    """

    prefix: str
    suffix: str = ""
    head_from: int | None = None
    files: tuple[ContextFile, ...] = ()
    repo: str = ""
    path: str = ""
    language: str = ""

    @property
    def line_head(self) -> str:
        """The cursor's line in front of it."""
        return self.prefix[self.prefix.rfind("\n") + 1 :]


@dataclass(frozen=True, slots=True)
class PackedPrompt:
    """``ids``: all of it, but for the word that the gap is in, ``healing_prefix``, which the filling has to begin with;
    it has ``n_healing_tokens`` tokens by itself. ``fills_in``: the text behind the gap is part of it. ``ends``: ids
    that end the filling."""

    ids: tuple[int, ...]
    fills_in: bool
    ends: tuple[int, ...]
    healing_prefix: str = ""
    n_healing_tokens: int = 0


class FimNotSupportedError(RequestError):
    """Nothing can be filled in here; the message says why and what to do instead."""

    reason = "FIM_NOT_SUPPORTED"
    http_status, grpc_code, field = 422, "FAILED_PRECONDITION", "suffix"
