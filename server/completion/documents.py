"""Documents that an editor changes, and gaps in them to fill."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from specdec.errors import InvalidRequestError, ViolationCollector

MAX_CHARACTERS = 1 << 21
# Characters around a gap that a prompt may use. The text before it starts at a multiple of BEFORE_STEP, so that the
# start stays while the cursor moves.
CHARACTERS_BEFORE, CHARACTERS_BEHIND = 1 << 17, 1 << 15
BEFORE_STEP = 1 << 14


class OffsetUnit(Enum):
    """The unit of offsets: Unicode code points, 16-bit units as in JavaScript and Java, or bytes. ``encoding`` takes
    ``width`` bytes for each."""

    CODE_POINT = ("utf-32-le", 4)
    UTF16 = ("utf-16-le", 2)
    UTF8 = ("utf-8", 1)

    def __init__(self, encoding: str, width: int) -> None:
        self.encoding, self.width = encoding, width

    def place_in(self, text: str, units: int) -> int:
        """The index in ``text`` after ``units`` units: at most its end; inside a character, that character's begin.
        Lone surrogates before the place are not counted, so that it is too low."""
        units = max(0, units)
        if self is OffsetUnit.CODE_POINT or text.isascii():
            return min(units, len(text))
        data = text[:units].encode(self.encoding, "surrogatepass")[: units * self.width]
        return len(data.decode(self.encoding, "ignore"))

    def units_of(self, text: str) -> int:
        """The length of ``text``."""
        if self is OffsetUnit.CODE_POINT or text.isascii():
            return len(text)
        return len(text.encode(self.encoding, "surrogatepass")) // self.width


@dataclass(frozen=True, slots=True)
class TextEdit:
    """Replaces the text between two offsets by ``text``."""

    start: int
    end: int
    text: str


@dataclass(slots=True)
class TextDocument:
    """A text at a version that its editor counts."""

    text: str
    version: int
    language: str = ""  # by the editor's name

    def apply(self, edits: Sequence[TextEdit], version: int, unit: OffsetUnit) -> None:
        """Apply each edit in turn, all or none.

        Raises:
            InvalidRequestError: an edit lies outside of the text, or the text would grow too long.
        """
        if self.text.isascii() and all(edit.text.isascii() for edit in edits):
            unit = OffsetUnit.UTF8  # the offsets are the same, and the text is the shortest
        data = bytearray(self.text.encode(unit.encoding))  # once for all edits, of which there may be thousands
        for i, edit in enumerate(edits):
            start, end = edit.start * unit.width, edit.end * unit.width
            if not (0 <= start <= end <= len(data) and all(_is_between(data, at, unit) for at in (start, end))):
                raise InvalidRequestError.of(
                    f"edits[{i}]", "start and end must lie in the text, in order, between characters"
                )
            data[start:end] = edit.text.encode(unit.encoding)
        text, violations = data.decode(unit.encoding), ViolationCollector()
        check_length(text, "edits", violations)
        violations.raise_if_any()
        self.text, self.version = text, version

    def around(self, place: int) -> tuple[str, str]:
        """The text before and after an index, at most `CHARACTERS_BEFORE` + `BEFORE_STEP` and `CHARACTERS_BEHIND`
        characters."""
        start = max(0, place - CHARACTERS_BEFORE) // BEFORE_STEP * BEFORE_STEP
        return self.text[start:place], self.text[place : place + CHARACTERS_BEHIND]


def _is_between(data: bytearray, at: int, unit: OffsetUnit) -> bool:
    """Whether no character of an encoded text goes on at byte ``at``."""
    if at == len(data):
        return True
    if unit is OffsetUnit.UTF8:
        return data[at] & 0xC0 != 0x80  # no continuation byte
    return unit is OffsetUnit.CODE_POINT or data[at + 1] & 0xFC != 0xDC  # no low surrogate


def check_length(text: str, field: str, violations: ViolationCollector) -> None:
    """Add a violation if the text exceeds `MAX_CHARACTERS`."""
    violations.check(
        len(text) <= MAX_CHARACTERS, field, f"a document may have {MAX_CHARACTERS} characters, got {len(text)}"
    )


def common_length(first: Sequence[object], second: Sequence[object]) -> int:
    """Items that both begin with, by binary search: slices compare faster than items. Both are of one type."""
    low, high = 0, min(len(first), len(second)) + 1
    while high - low > 1:
        middle = (low + high) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle
    return low


def place_of(text: str, offset: int, unit: OffsetUnit) -> int | None:
    """``offset`` as an index; None if it lies outside the text or inside a character."""
    place = unit.place_in(text, offset)  # too low after a lone surrogate: the comparison then gives None
    return place if unit.units_of(text[:place]) == offset else None


@dataclass(frozen=True, slots=True)
class ContextFile:
    """A file, or a part of one, for the prompt's context."""

    name: str
    text: str
    score: float = 0.0  # relevance; higher is taken first
    time_ms: int = 0  # when it was last viewed or changed


class FillMode(StrEnum):
    """Whether the prompt contains the text after the gap: always, if the model can use it, or never."""

    MIDDLE = "middle"
    MIDDLE_OR_PREFIX = "middle_or_prefix"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Gap:
    """The texts before and after a cursor, and their origin."""

    prefix: str
    suffix: str = ""
    head_from: int | None = None  # offset in ``prefix`` of the prompt's head; None: chosen for prefix cache hits
    files: tuple[ContextFile, ...] = ()
    repo: str = ""
    path: str = ""
    language: str = ""
