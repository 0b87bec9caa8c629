"""Incremental detokenisation, and the rules that end a text: stop strings, lines, indents, brackets, suffix."""

from __future__ import annotations

import codecs
import re
from dataclasses import dataclass
from typing import NamedTuple

from specdec.core.types import FinishReason, OutputParams, StoppingParams, TextRules
from specdec.models.tokenizer import Tokenizer


class TextPiece(NamedTuple):
    """Final text, and the end of the stream if it has ended. A named tuple, because one is built per token."""

    text: str
    reason: FinishReason | None = None
    stop: str | None = None
    """The stop string that matched."""


class TextStream:
    """Turns tokens into text. Holds back incomplete characters and text that a stop string or a rule may still cut off.

    The rule that holds at the earliest character ends the stream, so the end does not depend on token boundaries.
    skip: leading characters that are not part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, stopping: StoppingParams, output: OutputParams, skip: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._skipped = frozenset(tokenizer.special_ids if output.skip_special_tokens else ())
        self._wanted = output.text or bool(stopping.stop) or stopping.rules is not None or stopping.finish_line
        self._shown = output.text
        self._stops = stopping.stop
        self._cutter = TextCutter(stopping.rules) if stopping.rules is not None or stopping.finish_line else None
        self._include_stop = stopping.include_stop
        self._min_tokens = stopping.min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released = 0  # characters before _held
        self._tokens = 0

    def push(self, token: int) -> TextPiece:
        """Append a token. Stop strings and rules do not apply below ``min_tokens``."""
        self._tokens += 1
        if not self._wanted or token in self._skipped:
            return TextPiece("")
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """End the stream; returns the held-back text, up to where a rule cuts it, without an incomplete character."""
        cut = self._cutter.end() if self._cutter is not None and self._tokens > self._min_tokens else None
        return (self._release(len(self._held)) if cut is None else self._cut(cut)).text

    def end_at_line(self) -> None:
        """Let the next line break end the stream. Only for requests with ``finish_line``."""
        assert self._cutter is not None  # made for every such request
        self._cutter.end_at_line()

    def _take(self, text: str) -> TextPiece:
        if self._skip:
            self._skip, text = max(0, self._skip - len(text)), text[self._skip :]
        self._held += text
        binding = self._tokens > self._min_tokens
        cut = None if self._cutter is None else self._cutter.feed(text, binding=binding)
        if not binding:
            return self._release(len(self._held))
        found = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            end, at, stop = min(found)
            if cut is None or (end, at) <= (cut.seen - self._released, cut.place - self._released):
                piece = self._release(end if self._include_stop else at)
                self._held = ""
                return TextPiece(piece.text, FinishReason.STOP_STRING, stop)
        if cut is not None:
            return self._cut(cut)
        certain = len(self._held) - self._undecided()
        if self._cutter is not None:
            certain = min(certain, self._cutter.safe - self._released)
        return self._release(certain)

    def _cut(self, cut: Cut) -> TextPiece:
        piece = self._release(max(0, cut.place - self._released))
        self._held = ""
        return TextPiece(piece.text, cut.reason)

    def _release(self, length: int) -> TextPiece:
        text, self._held = self._held[:length], self._held[length:]
        self._released += length
        return TextPiece(text if self._shown else "")

    def _undecided(self) -> int:
        """Length of the longest suffix of the held text that is a prefix of a stop string."""
        begun = (stop[:size] for stop in self._stops for size in range(1, min(len(stop), len(self._held) + 1)))
        return max((len(each) for each in begun if self._held.endswith(each)), default=0)


@dataclass(frozen=True, slots=True)
class Cut:
    """The end of a text."""

    place: int
    """Characters before the end."""
    seen: int
    """Characters that were read before it was known."""
    reason: FinishReason


class TextCutter:
    """Applies rules to a text that arrives in pieces. The first character at which a rule holds ends the text; of
    several rules that hold there, or at the end of a text, the one that cuts off most counts. CRLF is never split."""

    def __init__(self, rules: TextRules | None) -> None:
        self._stops: list[TextStop] = [] if rules is None else _stops(rules)
        self._seen = 0  # characters
        self.safe = 0  # the text before this place is final
        self._open = ""  # the text after it

    def feed(self, text: str, *, binding: bool = True) -> Cut | None:
        """Append text; returns the cut if a rule holds. binding: False: the text is final whatever the rules say."""
        self._open += text
        for char in text:
            self._seen += 1
            places = [(stop.feed(char), stop) for stop in self._stops]
            if binding and any(place is not None for place, _ in places):
                return self._earliest([*places, *((stop.end(), stop) for stop in self._stops)])
        safe = self._seen
        if binding:
            safe = self._before_break(min((stop.safe for stop in self._stops), default=safe))
        if safe > self.safe:
            self._open = self._open[safe - self.safe :]
            self.safe = safe
        return None

    def end(self) -> Cut | None:
        """End the text; returns the cut if a rule holds at the end."""
        return self._earliest([(stop.end(), stop) for stop in self._stops])

    def end_at_line(self) -> None:
        """Let the next line break end the text, because its time limit has passed."""
        self._stops.append(LineStop(1, count_blank=True, reason=FinishReason.TIME_LIMIT, start=self._seen))

    def _earliest(self, places: list[tuple[int | None, TextStop]]) -> Cut | None:
        """The cut that takes away most, if any rule holds."""
        found = [(place, stop.reason) for place, stop in places if place is not None]
        if not found:
            return None
        place, reason = min(found, key=lambda each: each[0])
        return Cut(self._before_break(max(place, self.safe)), self._seen, reason)

    def _before_break(self, place: int) -> int:
        """``place``, or the place before it if that would split CRLF."""
        inside = place - self.safe
        return place - 1 if inside > 0 and self._open[inside - 1] == "\r" else place


def _stops(rules: TextRules) -> list[TextStop]:
    stops: list[TextStop] = []
    if rules.max_lines is not None:
        stops.append(LineStop(rules.max_lines))
    if rules.min_indent is not None:
        stops.append(IndentStop(rules.min_indent))
    if rules.blank_line:
        stops.append(BlankLineStop())
    if rules.closers is not None:
        stops.append(BracketStop(rules.closers, rules.quote, rules.suffix))
    if rules.quote not in ("", "#") and rules.suffix.startswith(rules.quote):
        stops.append(StringStop(rules.quote))
    if rules.suffix.strip():
        stops.append(SuffixStop(rules.suffix, rules.lead))
    return stops


class TextStop:
    """A rule. It reads a text one character at a time, also characters that another rule cuts off.

    Places are counted in characters from the text's start.
    """

    reason: FinishReason
    """The finish reason of a text that it ends."""
    safe = 0
    """Text before this place is never cut off by this rule. Set by `feed`."""

    def feed(self, char: str) -> int | None:
        """Read the next character; returns the place where the text ends, or None."""
        raise NotImplementedError

    def end(self) -> int | None:
        """The text ends; returns the place where it should have ended, or None."""
        return None


class BlankRunStop(TextStop):
    """A rule that holds line breaks back until it sees what follows them."""

    def __init__(self) -> None:
        self._at = 0  # characters read
        self._start: int | None = None  # place of the first line break after the last visible character
        self._breaks = 0  # line breaks from there on
        self._white = 0  # white space after the last line break

    def _track(self, char: str) -> None:
        if char == "\n":
            if self._start is None:
                self._start, self._breaks = self._at, 0
            self._breaks += 1
            self._white = 0
        elif char.isspace():
            self._white += 1
        else:
            self._start, self._breaks = None, 0
        self._at += 1
        self.safe = self._at if self._start is None else self._start


class BlankLineStop(BlankRunStop):
    """Ends a text at the line break before a line without visible characters. The rest of the line in which the text
    begins does not count."""

    reason = FinishReason.BLANK_LINE

    def feed(self, char: str) -> int | None:
        self._track(char)
        return self._start if self._breaks >= 2 else None


class LineStop(TextStop):
    """Ends a text before the line break of line ``lines``.

    The text begins with the rest of a line. If that is blank, it counts only with ``count_blank``.
    """

    def __init__(
        self, lines: int, *, count_blank: bool = False, reason: FinishReason = FinishReason.LINES, start: int = 0
    ) -> None:
        self.reason = reason
        self._left, self.safe = lines, start
        self._counts = count_blank

    def feed(self, char: str) -> int | None:
        at, self.safe = self.safe, self.safe + 1
        if char == "\n":
            if self._counts:
                self._left -= 1
                if self._left <= 0:  # below 0: the text was not allowed to end at an earlier one
                    return at
            self._counts = True
        elif not char.isspace():
            self._counts = True
        return None


class IndentStop(BlankRunStop):
    """Ends a text before the blank lines that precede a line with less than ``indent`` characters of white space. The
    line in which the text begins does not count."""

    reason = FinishReason.INDENT

    def __init__(self, indent: int) -> None:
        super().__init__()
        self._indent = indent

    def feed(self, char: str) -> int | None:
        start, indent = self._start, self._white
        self._track(char)
        return start if start is not None and self._start is None and indent < self._indent else None


_MARKS = "'\"`"  # quotation marks of common languages
_ONE_LINE = ("'", '"')  # strings of these end with their line


class CodeReader:
    """Separates code from strings and comments, without knowing the language.

    So it errs: text between two marks on a line counts as a string even if it is code (lifetimes, apostrophes), and
    ``//`` as a comment even if it divides. Its users ignore quoted text.
    """

    __slots__ = ("_escaped", "_last", "_run", "quote")

    def __init__(self, quote: str = "") -> None:
        self.quote = quote  # as `TextRules.quote`: "" in code, a quotation mark or three in a string, # in a comment
        self._last, self._run = "", 0  # the last character, and how often it came in a row
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Read the next character; returns whether it is code."""
        self._run = self._run + 1 if char == self._last else 1
        self._last = char
        if not self.quote:
            return self._open(char)
        self._close(char)
        return False

    def _open(self, char: str) -> bool:
        if char in _MARKS:
            # Two marks are an empty string; a third one makes them open a long string.
            self.quote = char * 3 if self._run == 3 and char != "`" else char
        elif char == "#" or (char == "/" and self._run == 2):
            self.quote = "#"
        else:
            return True
        self._run = 0 if len(self.quote) == 3 else self._run
        return False

    def _close(self, char: str) -> None:
        if self._escaped:
            self._escaped, self._run = False, 0
        elif char == "\\" and self.quote != "#":
            self._escaped = True
        elif char == (self.quote if self.quote != "#" else "\n") or (char == "\n" and self.quote in _ONE_LINE):
            self.quote = ""
        elif len(self.quote) == 3 and char == self.quote[0] and self._run == 3:
            self.quote, self._run = "", 0


CLOSERS = {"(": ")", "[": "]", "{": "}"}
CLOSING = frozenset(CLOSERS.values())


def close_bracket(opened: list[str], char: str) -> bool:
    """Remove ``char`` and the brackets left open inside it from ``opened``, closing brackets with the innermost last;
    returns whether it was there."""
    if char not in opened:
        return False
    while opened.pop() != char:
        pass
    return True


class BracketStop(BlankRunStop):
    """Ends a text at a bracket that the text did not open.

    closers: closing brackets that it may close all the same, in order. quote, suffix: as in `TextRules`. Brackets in
    strings and comments do not count, but those opened there are remembered: the rule misses an end rather than cut off
    code that was taken for a string.
    """

    reason = FinishReason.BRACKET

    def __init__(self, closers: str, quote: str, suffix: str) -> None:
        super().__init__()
        self._next = suffix.lstrip(" \t")[:1]
        self._open: list[str] = []  # closing brackets of the open ones, innermost last
        self._allowed = list(closers)
        self._quoted: list[str] = []  # the same for those opened in strings and comments
        self._reader = CodeReader(quote)

    def feed(self, char: str) -> int | None:
        """See `TextStop.feed`. A bracket that begins its line is cut off with the line break before it, unless it also
        stands right behind the text, as in editors that close brackets: then it keeps its line."""
        start, at = self._start, self._at
        self._track(char)
        is_code = self._reader.feed(char)
        if char in CLOSERS:
            (self._open if is_code else self._quoted).append(CLOSERS[char])
        elif is_code and char in CLOSING and not self._close(char):
            return at if start is None or char == self._next else start
        return None

    def _close(self, char: str) -> bool:
        """Close ``char``; returns whether it may be closed."""
        if close_bracket(self._open, char):
            return True
        if char in self._quoted:
            self._quoted.remove(char)
        elif self._allowed and self._allowed[0] == char:
            del self._allowed[0]
        else:
            return False
        return True


class StringStop(TextStop):
    """Ends a text that begins in a string whose closing mark follows it: before the mark with which the text leaves the
    string, unless it is in such a string again at the end of the line. quote: as `TextRules.quote`."""

    reason = FinishReason.SUFFIX

    def __init__(self, quote: str) -> None:
        self._quote, self._reader = quote, CodeReader(quote)
        self._at = 0  # characters read

    def feed(self, char: str) -> int | None:
        self._at += 1
        self._reader.feed(char)
        if self._reader.quote == self._quote:
            self.safe = self._at + 1 - len(self._quote)  # the last characters may begin a mark of three
            return None
        return self.safe if char == "\n" else None

    def end(self) -> int | None:
        return None if self._reader.quote == self._quote else self.safe


DISTINCT_CHARACTERS = 6  # visible characters of a repetition that is no coincidence; shorter ones are frequent
_LINE_BREAKS = re.compile("\n+")
# Closing brackets and tags, and marks that may follow them
_TRAIL = re.compile(r"""(?:</[\w.:-]*>|[)\]}>"'`;:, \t])+""")
_CLOSING_TAG = re.compile(r"\s*</([\w.:-]+)")


def visible(text: str) -> int:
    """Number of characters that are not white space."""
    return sum(not char.isspace() for char in text)


class SuffixStop(TextStop):
    """Ends a text where it begins to repeat ``suffix``, which has a visible character: searches its *anchor*, the marks
    that end the cursor's line, else the lines up to `DISTINCT_CHARACTERS` visible characters. Models often write fewer
    or more blank lines than follow, so these do not count, nor carriage returns.

    lead: the white space before the text, which a repetition may include. A match that closes brackets or a tag which
    the text opened is no repetition: ``foo(x)`` before ``)`` is whole. At the end of the text, a distinct prefix of the
    anchor suffices. One that begins with a quotation mark does not begin with an escaped one.
    """

    reason = FinishReason.SUFFIX

    def __init__(self, suffix: str, lead: str) -> None:
        lines = _LINE_BREAKS.sub("\n", suffix.replace("\r", "")).splitlines(keepends=True)
        # The anchor is only such marks: it counts if the text is as deep in brackets as at its start
        self._trail = bool(lines[0].strip()) and _TRAIL.fullmatch(lines[0].rstrip("\n")) is not None
        tag = _CLOSING_TAG.match(suffix)
        self._tags = None if tag is None else re.compile(rf"<(/?){re.escape(tag[1])}(?![\w.:-])([^<>]*/>)?")
        self._anchor = ""
        for line in lines:
            self._anchor += line
            if self._trail or visible(self._anchor) >= DISTINCT_CHARACTERS:
                break
        self._matches = 0  # bit n - 1: the anchor's prefix of length n ends the text
        self._places_of: dict[str, int] = {}  # by character, bit n: the anchor has it at n
        for place, char in enumerate(self._anchor):
            self._places_of[char] = self._places_of.get(char, 0) | 1 << place
        self._read: list[str] = []  # characters that count
        self._escaped = False  # whether a backslash precedes the next character
        self._at = -len(lead)
        self._places: list[int] = []  # of each character that counts
        self._depths = [0]  # bracket depth before each of them and at the end
        for char in lead:
            self._advance(char)

    def feed(self, char: str) -> int | None:
        self._advance(char)
        length, found = len(self._anchor), None
        if self._matches.bit_length() == length:
            self._matches ^= 1 << length - 1
            found = self._begin(length) if self._repeats(length) else None
        self.safe = self._begin(self._matches.bit_length())
        return found

    def end(self) -> int | None:
        """Search for the longest prefix of the anchor that suffices."""
        for length in range(self._matches.bit_length(), 0, -1):
            if not self._matches >> length - 1 & 1:
                continue
            part = self._anchor[:length]
            suffices = self._trail or part == self._anchor or visible(part) >= DISTINCT_CHARACTERS
            if suffices and part.strip() and self._repeats(length):
                return self._begin(length)
        return None

    def _begin(self, length: int) -> int:
        """The place of the last ``length`` characters that count."""
        return max(0, self._places[-length] if length else self._at)

    def _advance(self, char: str) -> None:
        self._at += 1
        if char == "\r" or (char == "\n" and self._read[-1:] == [char]):
            return
        self._read.append(char)
        self._depths.append(self._depths[-1] + (char in CLOSERS) - (char in CLOSING))
        self._places.append(self._at - 1)
        begins = not (self._escaped and self._anchor.startswith(("'", '"', "`")))
        self._matches = (self._matches << 1 | begins) & self._places_of.get(char, 0)
        self._escaped = char == "\\" and not self._escaped

    def _repeats(self, length: int) -> bool:
        """Whether the last ``length`` characters, a prefix of the anchor, are a repetition."""
        if self._tags is not None:
            found = self._tags.findall("".join(self._read[:-length]))
            tags = [mark for mark, end_of_empty in found if not end_of_empty]
            if tags.count("") > tags.count("/"):
                return False
        depths = self._depths[-1 - length :]
        outside = depths[0] <= 0
        return outside if self._trail else outside or min(depths) >= depths[0]
