"""Token ids to text, one token at a time, stopping at stop strings and by text rules."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from specdec.models.tokenizer import Tokenizer
from specdec.step.stops.text_cutter import Cut, TextCutter
from specdec.types import FinishReason, OutputParams, StoppingParams


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
