"""Token ids to text, one token at a time, and the rules that end a text: stop strings, lines, indents, brackets."""

from __future__ import annotations

import codecs
from dataclasses import dataclass
from typing import Protocol

from specdec.core.types import FinishReason, OutputParams, StoppingParams, TextRules
from specdec.models.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is now certain, why the stream ended if it did, and the stop string that ended it if one did."""

    text: str
    reason: FinishReason | None = None
    stop: str | None = None


class TextStream:
    """Incremental detokenisation: holds back half a character, and text that may begin a stop string or be cut off by a
    rule. What ends the stream is what holds at the earliest character, so it does not depend on where tokens part.
    The first ``skip`` characters are not part of the text."""

    def __init__(self, tokenizer: Tokenizer, stopping: StoppingParams, output: OutputParams, skip: int = 0) -> None:
        self._tokenizer = tokenizer
        self._skip = skip
        self._special = frozenset(tokenizer.special_ids)
        self._skip_special = output.skip_special_tokens
        self._wanted = output.text or bool(stopping.stop) or stopping.rules is not None or stopping.finish_line
        self._shown = output.text
        self._stops = stopping.stop
        self._cutter = TextCutter(stopping.rules) if stopping.rules is not None or stopping.finish_line else None
        self._include_stop = stopping.include_stop
        self._min_tokens = stopping.min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._released = 0  # characters in front of _held
        self._tokens = 0

    def push(self, token: int) -> TextPiece:
        """Take the next token; below ``min_tokens`` stop strings and rules are passed over."""
        self._tokens += 1
        if not self._wanted or (self._skip_special and token in self._special):
            return TextPiece("")
        return self._take(self._decoder.decode(self._tokenizer.token_bytes(token)))

    def flush(self) -> str:
        """The stream ends: what was held back is certain now, but for what a rule finds wrong with the end."""
        piece = self._take(self._decoder.decode(b"", final=True))
        if piece.reason is not None:
            return piece.text
        cut = self._cutter.end() if self._cutter is not None and self._tokens > self._min_tokens else None
        rest = self._release(len(self._held)) if cut is None else self._cut(cut)
        return piece.text + rest.text

    def end_at_line(self) -> None:
        """The next line break ends the stream; only for requests with ``finish_line``."""
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
        """Length of the longest end of the held text that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop[:size]):
                    longest = size
                    break
        return longest


@dataclass(frozen=True, slots=True)
class Cut:
    """The text ends at ``place``; known once ``seen`` characters had been seen."""

    place: int
    seen: int
    reason: FinishReason


class TextCutter:
    """Reads a text in pieces, however they are cut: the first character at which a rule holds ends it, and of several
    rules that hold there the one that cuts off most. A line break of two characters stays whole."""

    def __init__(self, rules: TextRules | None) -> None:
        self._stops: list[TextStop] = [] if rules is None else _stops(rules)
        self._seen = self._safe = 0
        self._open = ""  # the text behind _safe

    @property
    def safe(self) -> int:
        """Text before this place is certain."""
        return self._safe

    def feed(self, text: str, *, binding: bool = True) -> Cut | None:
        """Take more text. Not ``binding``: it is certain, whatever the rules say of it."""
        for char in text:
            self._seen += 1
            self._open += char
            found: Cut | None = None
            for stop in self._stops:
                place = stop.feed(char)
                if place is not None and (found is None or place < found.place):
                    found = Cut(place, self._seen, stop.reason)
            if binding and found is not None:
                return self._clamped(found)
            safe = min((stop.safe for stop in self._stops), default=self._seen) if binding else self._seen
            self._release_up_to(self._before_break(safe) if binding else safe)
        return None

    def end(self) -> Cut | None:
        """The text ended by itself; the place where a rule would end it, if one would."""
        found: Cut | None = None
        for stop in self._stops:
            place = stop.end()
            if place is not None and (found is None or place < found.place):
                found = Cut(place, self._seen, stop.reason)
        return None if found is None else self._clamped(found)

    def end_at_line(self) -> None:
        """From here on the next line break ends the text, because its time is over."""
        self._stops.append(LineStop(1, count_blank=True, reason=FinishReason.TIME_LIMIT, start=self._seen))

    def _release_up_to(self, place: int) -> None:
        if place > self._safe:
            self._open = self._open[place - self._safe :]
            self._safe = place

    def _clamped(self, cut: Cut) -> Cut:
        return Cut(self._before_break(max(cut.place, self._safe)), cut.seen, cut.reason)

    def _before_break(self, place: int) -> int:
        """``place``, or the one before where that would part the two characters of a line break."""
        inside = place - self._safe
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
        stops.append(BracketStop(rules.closers, rules.quote))
    if rules.suffix.strip():
        stops.append(SuffixStop(rules.suffix, rules.lead))
    return stops


class TextStop(Protocol):
    """Reads a text one character at a time. Places are counted in characters from the text's start.

    A rule sees every character, those that another rule cuts off too, and keeps no more than it needs to decide.
    """

    @property
    def reason(self) -> FinishReason:
        """Why a text that it ends has ended."""

    @property
    def safe(self) -> int:
        """Text before this place will not be cut off by this rule, whatever comes."""

    def feed(self, char: str) -> int | None:
        """Take the next character; the place where the text ends, if it does."""

    def end(self) -> int | None:
        """The text ended by itself; the place where it should have, if that is earlier."""


class BlankRun:
    """Follows a text. ``start``: the line break behind the last visible character, once there is one, until the next
    visible character; for a text that begins with blank lines, their first line break. ``breaks``: line breaks since
    then, itself among them. ``indent``: characters of white space since the last of them."""

    __slots__ = ("at", "breaks", "indent", "start")

    def __init__(self) -> None:
        self.at = 0
        self.start: int | None = None
        self.breaks = self.indent = 0

    @property
    def safe(self) -> int:
        """Everything before the run."""
        return self.at if self.start is None else self.start

    def feed(self, char: str) -> None:
        """Take the next character."""
        if char == "\n":
            if self.start is None:
                self.start, self.breaks = self.at, 0
            self.breaks += 1
            self.indent = 0
        elif char.isspace():
            self.indent += 1
        else:
            self.start, self.breaks = None, 0
        self.at += 1


class BlankLineStop:
    """Ends it at the line break in front of a line without visible characters; what is left of the line that the text
    begins in is no blank line."""

    reason = FinishReason.BLANK_LINE

    def __init__(self) -> None:
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """A line break is kept until it is known what follows."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Look for a second line break in a row."""
        self._run.feed(char)
        return self._run.start if self._run.breaks == 2 else None

    def end(self) -> int | None:
        """White space behind the last line break may be the begin of a line."""
        return None


class LineStop:
    """Ends it before the line break of line ``lines``.

    What the text begins with is the rest of a line: where that is blank it is not counted, unless ``count_blank``.
    """

    def __init__(
        self, lines: int, *, count_blank: bool = False, reason: FinishReason = FinishReason.LINES, start: int = 0
    ) -> None:
        self.reason = reason
        self._left, self._at = lines, start
        self._counts = count_blank

    @property
    def safe(self) -> int:
        """All of it: a line break is decided on at once."""
        return self._at

    def feed(self, char: str) -> int | None:
        """Count line breaks."""
        at, self._at = self._at, self._at + 1
        if char == "\n":
            if self._counts:
                self._left -= 1
                if self._left == 0:
                    return at
            self._counts = True
        elif not char.isspace():
            self._counts = True
        return None

    def end(self) -> int | None:
        """Nothing is held back."""
        return None


class IndentStop:
    """Ends it before the blank lines that lead to a line with fewer than ``indent`` characters of white space. The line
    that the text begins in is none of them."""

    reason = FinishReason.INDENT

    def __init__(self, indent: int) -> None:
        self._indent = indent
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """Line breaks are kept until it is known what follows."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Look at the first visible character of each line."""
        run = self._run
        start, indent = run.start, run.indent
        run.feed(char)
        return start if start is not None and run.start is None and indent < self._indent else None

    def end(self) -> int | None:
        """Blank lines at the end are no dedent."""
        return None


_MARKS = "'\"`"
_LONG = ("'''", '"""')
_ONE_LINE = ("'", '"')
QUOTES = ("", *_MARKS, *_LONG, "#")


class CodeReader:
    """``quote`` says what the text is in: "" code, a quotation mark, three of them, or ``#`` a comment (``//`` too).

    Knows no language, so it errs; what lies between two marks on a line is taken for a string though it may be code
    (lifetimes, apostrophes), a comment for one though it may be a division. Who asks should make nothing of what is
    quoted.
    """

    __slots__ = ("_escaped", "_last", "_run", "quote")

    def __init__(self, quote: str = "") -> None:
        self.quote = quote
        self._last, self._run = "", 0  # the last character, and how often it came in a row
        self._escaped = False

    def feed(self, char: str) -> bool:
        """Take the next character; whether it is code."""
        self._run = self._run + 1 if char == self._last else 1
        self._last = char
        if not self.quote:
            return self._open(char)
        self._close(char)
        return False

    def _open(self, char: str) -> bool:
        if char in _MARKS:
            # Two marks were an empty string, and the third makes them one mark that opens a long one.
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


class BracketStop:
    """``closers``: what it may close though it did not open it, in order. ``quote``: what it begins in the middle of,
    as `CodeReader` calls it.

    Brackets in strings and comments don't count. Those opened where only seems to be a string are remembered: the rule
    rather misses an end than cuts a text that is whole.
    """

    reason = FinishReason.BRACKET

    def __init__(self, closers: str = "", quote: str = "") -> None:
        self._open: list[str] = []  # what would close the brackets opened, innermost last
        self._allowed = list(closers)
        self._quoted: list[str] = []  # the same for those opened in strings and comments
        self._reader = CodeReader(quote)
        self._run = BlankRun()

    @property
    def safe(self) -> int:
        """A line break is kept until it is known whether a bracket follows it."""
        return self._run.safe

    def feed(self, char: str) -> int | None:
        """Follow the brackets; one that begins its line takes the line break in front of it along."""
        start, at = self._run.start, self._run.at
        self._run.feed(char)
        is_code = self._reader.feed(char)
        if char in CLOSERS:
            (self._open if is_code else self._quoted).append(CLOSERS[char])
        elif is_code and char in CLOSING and not self._close(char):
            return at if start is None else start
        return None

    def end(self) -> int | None:
        """Line breaks at the end stay."""
        return None

    def _close(self, char: str) -> bool:
        """Whether ``char`` closes something it may close; what was left open inside is closed along."""
        if char in self._open:
            while self._open.pop() != char:
                pass
        elif char in self._quoted:
            self._quoted.remove(char)
        elif self._allowed and self._allowed[0] == char:
            del self._allowed[0]
        else:
            return False
        return True


SURE = 6  # visible characters that are no chance; fewer are said often
_TRAIL = frozenset(")]}>\"'`;:, \t")


@dataclass(frozen=True, slots=True)
class SuffixAnchor:
    """``text`` begins the suffix. ``trail``: it is what stands behind the cursor on its line, nothing but closing
    brackets and marks: then it counts only where the text is as deep in brackets as at its start."""

    text: str
    trail: bool

    @staticmethod
    def of(suffix: str) -> SuffixAnchor:
        """The marks that end the cursor's line; else as many lines as hold `SURE` visible characters, or all there is.

        Empty where nothing can be told: no visible character follows.
        """
        lines = suffix.splitlines(keepends=True)
        if not suffix.strip():
            return SuffixAnchor("", False)
        if lines[0].strip() and _TRAIL.issuperset(lines[0].rstrip("\r\n")):
            return SuffixAnchor(lines[0], True)
        seen = 0
        for count, line in enumerate(lines, 1):
            seen += visible(line)
            if seen >= SURE:
                return SuffixAnchor("".join(lines[:count]), False)
        return SuffixAnchor(suffix, False)

    def told_by(self, length: int) -> bool:
        """Whether its first ``length`` characters, at a text's very end, prove it too."""
        part = self.text[:length]
        return bool(part.strip()) and (self.trail or visible(part) >= SURE or length == len(self.text))


def visible(text: str) -> int:
    """Characters that are no white space."""
    return sum(not char.isspace() for char in text)


class SuffixStop:
    """Looks for the anchor of ``suffix`` (`SuffixAnchor`) by the automaton of Knuth, Morris and Pratt 1977.

    ``lead`` is the white space in front of the text, which a repetition may take along. A repetition that closes
    brackets which the text opened before it is none: ``foo(x)`` in front of ``)`` is whole. At the text's end a
    beginning of the anchor is enough where it is no chance.
    """

    reason = FinishReason.SUFFIX

    def __init__(self, suffix: str, lead: str = "") -> None:
        self._anchor = SuffixAnchor.of(suffix)
        self._falls = _falls(self._anchor.text)
        self._matched = 0  # characters of the anchor that end the text so far
        self._depths = [0]  # of brackets, before each character and at the end
        self._at = -len(lead)
        for char in lead:
            self._advance(char)

    @property
    def safe(self) -> int:
        """What may turn out to be a repetition is kept."""
        return max(0, self._at - self._matched)

    def feed(self, char: str) -> int | None:
        """Look for the whole anchor."""
        self._advance(char)
        anchor = self._anchor.text
        if not anchor or self._matched < len(anchor):
            return None
        found = self._repeats(len(anchor))
        place = max(0, self._at - len(anchor))
        self._matched = self._falls[-1]
        return place if found else None

    def end(self) -> int | None:
        """Look for the longest beginning of the anchor."""
        length = self._matched
        while length:
            if self._anchor.told_by(length) and self._repeats(length):
                return max(0, self._at - length)
            length = self._falls[length - 1]
        return None

    def _advance(self, char: str) -> None:
        depth = self._depths[-1]
        self._depths.append(depth + (char in CLOSERS) - (char in CLOSING))
        self._at += 1
        anchor, matched = self._anchor.text, self._matched
        while matched and (matched == len(anchor) or anchor[matched] != char):
            matched = self._falls[matched - 1]
        self._matched = matched + 1 if anchor and anchor[matched] == char else 0

    def _repeats(self, length: int) -> bool:
        """Whether the last ``length`` characters, which begin the anchor, are no part of what the text has to say."""
        depths = self._depths[-1 - length :]
        outside = depths[0] <= 0
        return outside if self._anchor.trail else outside or min(depths) >= depths[0]


def _falls(pattern: str) -> list[int]:
    """For each beginning of ``pattern``, the length of its longest proper end that begins ``pattern`` too."""
    falls, length = [0] * len(pattern), 0
    for i in range(1, len(pattern)):
        while length and pattern[i] != pattern[length]:
            length = falls[length - 1]
        length += pattern[i] == pattern[length]
        falls[i] = length
    return falls
