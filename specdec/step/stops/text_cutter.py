"""All rules of one request over its text."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.step.stops.blank_line_stop import BlankLineStop
from specdec.step.stops.bracket_stop import BracketStop
from specdec.step.stops.indent_stop import IndentStop
from specdec.step.stops.line_stop import LineStop
from specdec.step.stops.suffix_stop import SuffixStop
from specdec.step.stops.text_stop import TextStop
from specdec.types import FinishReason, TextRules


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
            self._settle(self._before_break(safe) if binding else safe)
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

    def _settle(self, place: int) -> None:
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
