"""Places where a text may be parted so that typing further down does not move them."""

from __future__ import annotations

from typing import NamedTuple
from zlib import crc32

LONG_LINE = 1024  # characters after which a line may be parted inside
TOP = 32  # the level of a text's very begin


class LineBreak(NamedTuple):
    """``at``: offset in the text. ``level``: the higher the rarer, half as often with each step."""

    at: int
    level: int


def line_breaks(text: str, *, before: bool = False) -> list[LineBreak]:
    """The begin of ``text``, the begins of its lines, and places inside long ones.

    A level is drawn from a hash of the two lines in front of the place that show something. So it stays as it is while
    text is added behind it, and is found again when the begin of the text is cut off elsewhere: the rarest place of a
    stretch is the same one for long, however the stretch moves. Where the tokens would change, between blank lines, a
    text is never parted. ``before``: places are those in front of line breaks instead of behind them.
    """
    found = [LineBreak(0, TOP)]
    lines = text.split("\n")
    last, start, level = len(lines) - 1, 0, 0
    above = 0  # hash of the last line that shows something
    shows = False  # whether the line in front does
    for number, line in enumerate(lines):
        visible = bool(line) and not line.isspace()
        # The last line may become anything yet, so nothing is made of what it holds.
        if start and (shows if before else visible or number == last):
            found.append(LineBreak(start - before, level))
        if len(line) > LONG_LINE:
            found += [LineBreak(start + at, 0) for at in range(LONG_LINE, len(line), LONG_LINE)]
        if visible and number != last:
            data = line.encode("utf-8", "surrogatepass")
            mixed = crc32(data, above)
            level = (mixed & -mixed).bit_length() - 1 if mixed else TOP - 1
            above = crc32(data)
        start += len(line) + 1
        shows = visible
    return found
