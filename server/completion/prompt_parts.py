"""Splits texts into parts whose borders stay while the text grows, for prefix cache hits."""

from __future__ import annotations

import re
import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple
from zlib import crc32

from specdec.models.tokenizer import Tokenizer

CACHED_CHARACTERS = 1 << 21
ENTRY = 64  # characters that a cache entry weighs besides its text
_PROBE = "a)\n    b"


class UserText:
    """Encodes users' texts, with a cache. Thread-safe."""

    def __init__(self, tokenizer: Tokenizer, reserved: Mapping[int, str], capacity: int = CACHED_CHARACTERS) -> None:
        """reserved: names by id of tokens that no text may produce, besides special ones. capacity: characters."""
        self._tokenizer = tokenizer
        self._reserved = frozenset(reserved) | tokenizer.special_ids
        names = "|".join(re.escape(name) for name in sorted(reserved.values()))
        self._name_starts = re.compile(f"(?=(?:{names}))" if names else r"(?!)")
        self._capacity, self._held = capacity, 0
        self._known: OrderedDict[tuple[str, str, bool], tuple[int, ...]] = OrderedDict()
        self._lock = threading.Lock()
        self._adds_space = self._text_of(self._plain("a")) == b" a"
        whole, behind, before = (self._parted(at) for at in (0, 3, 2))
        # Split before line breaks, not after them: depends on how the vocabulary splits words.
        self.breaks_before = behind != whole == before
        self.digits_alone = len(self._encode("1234567", False)) == 7  # no token has two digits

    @property
    def begin(self) -> tuple[int, ...]:
        """The begin token, if the model has one."""
        return tuple(self._tokenizer.encode("", add_special=True))

    def encode(self, text: str, owner: str = "", *, begins: bool = False) -> tuple[int, ...]:
        """Ids of ``text`` as the continuation of another text.

        owner: scope of the cache. begins: encode as the start of a text, where some vocabularies add a space.
        """
        key = (owner, text, begins and self._adds_space)
        with self._lock:
            known = self._known.get(key)
            if known is not None:
                self._known.move_to_end(key)
                return known
        ids = tuple(self._encode(text, begins))
        with self._lock:
            if key not in self._known and len(text) <= self._capacity // 8:
                self._known[key] = ids
                self._held += len(text) + ENTRY
                while self._held > self._capacity:
                    (_, dropped, _), _ = self._known.popitem(last=False)
                    self._held -= len(dropped) + ENTRY
        return ids

    def knows(self, text: str, owner: str = "") -> bool:
        """Whether the encoding is cached."""
        return (owner, text, False) in self._known

    def line_end(self, ids: tuple[int, ...], low: int, high: int) -> int:
        """The largest count in ``low``..``high`` of leading ids that end with a line break; ``high`` if none does."""
        for count in range(high, max(low, 1) - 1, -1):
            if b"\n" in self._tokenizer.token_bytes(ids[count - 1]):
                return count
        return high

    def line_breaks(self, ids: Iterable[int]) -> int:
        """Line breaks in the text of ``ids``."""
        return sum(self._tokenizer.token_bytes(i).count(b"\n") for i in ids)

    def _parted(self, at: int) -> list[int]:
        """Ids of the probe, encoded in two parts."""
        return self._encode(_PROBE[:at], False) + self._encode(_PROBE[at:], False)

    def _encode(self, text: str, begins: bool) -> list[int]:
        if begins or not self._adds_space:
            return self._plain(text)
        # No space is added after a line break; the line break itself is removed again.
        ids = self._plain("\n" + text)
        for count in (1, 2):
            if self._text_of(ids[:count]) in (b" \n", b"\n"):
                return ids[count:]
        return self._plain(text)

    def _plain(self, text: str) -> list[int]:
        ids = self._tokenizer.encode(text, add_special=False)
        found = self._reserved.intersection(ids)
        if not found:
            return ids
        # The tokenizer treats these as ordinary tokens, but prompts give them a meaning: split their names.
        cuts = [0, *(match.start() + 1 for match in self._name_starts.finditer(text)), len(text)]
        pieces = [text[a:b] for a, b in pairwise(cuts)]
        parted = [i for piece in pieces for i in self._tokenizer.encode(piece, add_special=False)]
        return [i for i in parted if i not in self._reserved]

    def _text_of(self, ids: Iterable[int]) -> bytes:
        return b"".join(map(self._tokenizer.token_bytes, ids))


LONG_LINE = 1024  # characters after which a line may be split
TOP_LEVEL = 32  # the level of the start of a text


class LineBreak(NamedTuple):
    """A place where a text may be split."""

    at: int  # offset in the text
    level: int  # each level is half as frequent as the one below


def line_breaks(text: str, *, before: bool = False) -> list[LineBreak]:
    """The starts of ``text`` and of its lines, and places inside long lines.

    The level of a place is a hash of the two visible lines before it. It therefore stays while text is added after it
    or removed at the start: the rarest place of a window stays the same while the window moves. Texts are never split
    between blank lines, where tokens would change.

    before: split before line breaks instead of after them.
    """
    found = [LineBreak(0, TOP_LEVEL)]
    lines = text.split("\n")
    last, start, level = len(lines) - 1, 0, 0
    above = 0  # hash of the last visible line
    shows = False  # whether the line before is visible
    for number, line in enumerate(lines):
        visible = bool(line) and not line.isspace()
        # The last line may still change, so its content is not used.
        if start and (shows if before else visible or number == last):
            found.append(LineBreak(start - before, level))
        if len(line) > LONG_LINE:
            found += [LineBreak(start + at, 0) for at in range(LONG_LINE, len(line), LONG_LINE)]
        if visible and number != last:
            data = line.encode("utf-8", "surrogatepass")
            mixed = crc32(data, above)
            level = (mixed & -mixed).bit_length() - 1 if mixed else TOP_LEVEL - 1
            above = crc32(data)
        start += len(line) + 1
        shows = visible
    return found


LONGEST_HEALING_PREFIX = 24  # characters; a longer word is hardly one token, and repeating it takes time
_LETTERS, _MARK = r"[^\W\d_]+", r"(?:[^\w\s]|_)"
# From the end of a text backwards. A mark behind a space or another mark belongs to the word before.
_LAST_WORD = re.compile(rf"{_LETTERS}(?:[^\S\r\n]|{_MARK}(?! |{_MARK}))?|\d+ ?|{_MARK}+ ?|\s+")


def healing_prefix_of(text: str, *, breaks_before: bool, digits_alone: bool) -> str:
    """The last word of ``text``, which the prompt omits and the answer repeats (token healing).

    Words are those of the pre-tokenizer of GPT-2 and its descendants: letters or digits with one leading space,
    punctuation with one leading space, one punctuation mark with the letters after it. The last character of white
    space belongs to the next word. Returns "" if the text ends between words or the word is too long.

    breaks_before: line breaks belong to the white space after them. digits_alone: each digit is a token.
    """
    # Reversed, and no more of it than shows that a word is too long
    found = _LAST_WORD.match(text[: -2 * LONGEST_HEALING_PREFIX - 1 : -1])
    if found is None:  # the text is empty
        return ""
    word = found[0][::-1]
    if word.isspace() and not word.endswith("\n"):
        return word[-1]
    if (word.isspace() and not breaks_before) or (word[-1].isdigit() and digits_alone):
        return ""
    if len(word) > LONGEST_HEALING_PREFIX:
        return ""
    return word if word.isascii() or word.isspace() else word[-1]


HEAD_LINES, HEAD_CHARACTERS = 16, 1024
CHUNK_LEVEL = 3  # on average every eighth line starts a chunk
LARGEST_CHUNK = 2048  # characters


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids of a part of the prefix, and the level of the place where it starts."""

    ids: tuple[int, ...]
    level: int


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """The prefix of a gap, in parts."""

    above: tuple[Chunk, ...]  # before the head, in order
    head: tuple[int, ...]  # the last lines, without ``healing_prefix``
    whole: bool  # ``above`` starts at the start of the prefix
    healing_prefix: str  # the last word

    @property
    def n_above(self) -> int:
        return sum(len(chunk.ids) for chunk in self.above)

    @staticmethod
    def of(
        prefix: str,
        text: UserText,
        *,
        window: int,
        chunk: int,
        head_from: int | None = None,
        heal: bool = True,
        spaced: bool = False,
        owner: str = "",
    ) -> PrefixParts:
        """The parts of the last ``window`` characters of ``prefix`` or slightly more.

        chunk: about the most characters of a chunk and of the head. head_from: start of the head; None: the rarest
        line break among the last `HEAD_LINES` lines and `HEAD_CHARACTERS` characters. heal: omit the last word. spaced:
        keep the space that the vocabulary adds at the start of a text.
        """
        cut = max(0, len(prefix) - window) // LONG_LINE * LONG_LINE
        shown = prefix[cut:]
        breaks = line_breaks(shown, before=text.breaks_before)
        if head_from is None:
            head_from = _head_from(breaks, len(shown) - min(HEAD_CHARACTERS, chunk))
        else:
            head_from = min(max(0, head_from - cut), len(shown))
        places = _chunks([b for b in breaks if b.at < head_from], head_from, max(1, min(chunk, LARGEST_CHUNK)))
        if cut and len(places) > 1:
            places = places[1:]  # the first part starts at a moving border
        ends = [*(place.at for place in places), head_from]
        begins = spaced and cut == 0
        above = tuple(
            Chunk(text.encode(shown[a:b], owner, begins=begins and a == 0), place.level)
            for place, (a, b) in zip(places, pairwise(ends), strict=True)
        )
        head, healing_prefix = shown[head_from:], ""
        if heal:
            healing_prefix = healing_prefix_of(head, breaks_before=text.breaks_before, digits_alone=text.digits_alone)
            head = head.removesuffix(healing_prefix)
        return PrefixParts(above, text.encode(head, owner, begins=begins and not above), cut == 0, healing_prefix)

    def fit(self, room: int) -> tuple[list[int], list[int]]:
        """Ids of above and head nearest to the gap, at most ``room`` together.

        The kept part starts at the rarest border in the outermost quarter of the room, so that the start stays while
        the text grows.
        """
        if len(self.head) >= room:
            return [], _tail(self.head, room, room // 4)
        rest = room - max(len(self.head), min(room // 4, 256))
        start, total, best = len(self.above), 0, -1
        for i in range(len(self.above) - 1, -1, -1):
            chunk = self.above[i]
            total += len(chunk.ids)
            if total > rest:
                break
            in_quarter = total >= rest - rest // 4
            if not in_quarter or chunk.level >= best:
                start, best = i, chunk.level if in_quarter else -1
        else:
            start = 0 if self.whole else start
        kept = [token for chunk in self.above[start:] for token in chunk.ids]
        if not kept and self.above and rest > 0:
            kept = _tail(self.above[-1].ids, rest, room // 4)
        return kept, list(self.head)


def _tail(ids: Sequence[int], room: int, step: int) -> list[int]:
    """The last ids, at most ``room``; their start stays while fewer than ``step`` are added."""
    step = max(1, step)
    left_out = -(-max(0, len(ids) - room) // step) * step
    return list(ids[left_out:])


def _head_from(breaks: Sequence[LineBreak], earliest: int) -> int:
    near = [b for b in breaks[-HEAD_LINES:] if b.at >= earliest] or [breaks[-1]]
    return max(near, key=lambda b: (b.level, -b.at)).at


def _chunks(breaks: list[LineBreak], end: int, largest: int) -> list[LineBreak]:
    """The places at which chunks start: the rare ones, and the rarest ones inside chunks that are too large."""
    found: list[LineBreak] = []
    starts = [i for i, b in enumerate(breaks) if i == 0 or b.level >= CHUNK_LEVEL]
    for a, b in pairwise([*starts, len(breaks)] if starts else []):
        found += _parted(breaks[a:b], breaks[b].at if b < len(breaks) else end, largest)
    return found


def _parted(breaks: list[LineBreak], end: int, largest: int) -> Iterator[LineBreak]:
    """The first of ``breaks``, then repeatedly the rarest one between half and one ``largest`` further on."""
    at = 0
    yield breaks[0]
    while end - breaks[at].at > largest and at + 1 < len(breaks):
        # The first breaks that are further on than half of ``largest`` and than all of it; at least one is a candidate.
        near, far = (bisect_right(breaks, breaks[at].at + n, key=lambda b: b.at) for n in (largest // 2, largest))
        near = min(max(near, at + 1), len(breaks) - 1)
        at = max(range(near, max(far, near + 1)), key=lambda i: (breaks[i].level, -i))
        yield breaks[at]
