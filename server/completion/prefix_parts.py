"""The text in front of a gap, in parts whose borders stay while it grows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

from server.completion.line_breaks import LONG_LINE, LineBreak, line_breaks
from server.completion.open_word import open_word
from server.completion.user_text import UserText

HEAD_LINES, HEAD_CHARACTERS = 16, 1024
CHUNK_LEVEL = 3  # every eighth line begins a chunk
LARGEST_CHUNK = 2048


@dataclass(frozen=True, slots=True)
class Chunk:
    """Ids of a part, and the level of the line break it begins at."""

    ids: tuple[int, ...]
    level: int


@dataclass(frozen=True, slots=True)
class PrefixParts:
    """``above``: chunks in order. ``head``: the last lines, but for ``healed``, the word they end in. ``whole``: there
    is nothing in front of ``above``."""

    above: tuple[Chunk, ...]
    head: tuple[int, ...]
    whole: bool
    healed: str

    @property
    def n_above(self) -> int:
        """Tokens of ``above``."""
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
        """The parts of the last ``window`` characters of ``prefix`` or a few more; chunks and head have about ``chunk``
        characters at most.

        ``head_from``: where the head begins, if that is given; else at the rarest line break (`line_breaks`) among the
        last `HEAD_LINES` lines and `HEAD_CHARACTERS` characters, which stays while text is added, and mostly while
        lines are. ``heal``: leave out the word that the head ends in. ``spaced``: a text begins with the space that the
        vocabulary puts there, if it does.
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
            places = places[1:]  # what it begins with has no fixed border
        ends = [*(place.at for place in places), head_from]
        begins = spaced and cut == 0
        above = tuple(
            Chunk(text.encode(shown[a:b], owner, begins=begins and a == 0), place.level)
            for place, (a, b) in zip(places, pairwise(ends), strict=True)
        )
        head, healed = shown[head_from:], ""
        if heal:
            healed = open_word(head, breaks_before=text.breaks_before, digits_alone=text.digits_alone)
            head = head.removesuffix(healed)
        return PrefixParts(above, text.encode(head, owner, begins=begins and not above), cut == 0, healed)

    def fit(self, room: int) -> tuple[list[int], list[int]]:
        """Ids of above and head, at most ``room`` together, the nearest ones.

        What is left out in front goes in large pieces: what is kept begins at the rarest border in the outermost
        quarter of the room, so that it stays the same while the text grows.
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
    """The last ids, at most ``room``; their begin stays while less than ``step`` are added."""
    step = max(1, step)
    left_out = -(-max(0, len(ids) - room) // step) * step
    return list(ids[left_out:])


def _head_from(breaks: Sequence[LineBreak], earliest: int) -> int:
    near = [b for b in breaks[-HEAD_LINES:] if b.at >= earliest] or [breaks[-1]]
    return max(near, key=lambda b: (b.level, -b.at)).at


def _chunks(breaks: list[LineBreak], end: int, largest: int) -> list[LineBreak]:
    """Those of ``breaks`` at which chunks begin: the rare ones, and what parts too large chunks at their rarest."""
    found: list[LineBreak] = []
    starts = [i for i, b in enumerate(breaks) if i == 0 or b.level >= CHUNK_LEVEL]
    for a, b in pairwise([*starts, len(breaks)] if starts else []):
        found += _parted(breaks[a:b], breaks[b].at if b < len(breaks) else end, largest)
    return found


def _parted(breaks: list[LineBreak], end: int, largest: int) -> Iterator[LineBreak]:
    """The first of ``breaks``, and from each the rarest one half to whole a ``largest`` further on."""
    at = 0
    yield breaks[0]
    while end - breaks[at].at > largest and at + 1 < len(breaks):
        near = at + 1
        while near + 1 < len(breaks) and breaks[near].at - breaks[at].at <= largest // 2:
            near += 1
        far = near + 1
        while far < len(breaks) and breaks[far].at - breaks[at].at <= largest:
            far += 1
        at = max(range(near, far), key=lambda i: (breaks[i].level, -i))
        yield breaks[at]
