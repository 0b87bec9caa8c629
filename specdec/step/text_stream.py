"""Token ids to text, one token at a time, stopping at stop strings."""

from __future__ import annotations

import codecs
from dataclasses import dataclass

from specdec.models.tokenizer import Tokenizer
from specdec.types import OutputParams, StoppingParams


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is now certain, and the stop string that ended the stream, if one did."""

    text: str
    stop: str | None = None


class TextStream:
    """Incremental detokenisation: holds back half a character, and text that may begin a stop string."""

    def __init__(self, tokenizer: Tokenizer, stopping: StoppingParams, output: OutputParams) -> None:
        self._tokenizer = tokenizer
        self._special = frozenset(tokenizer.special_ids)
        self._skip_special = output.skip_special_tokens
        self._wanted = output.text or bool(stopping.stop)
        self._shown = output.text
        self._stops = stopping.stop
        self._include_stop = stopping.include_stop
        self._min_tokens = stopping.min_tokens
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self._tokens = 0

    def push(self, token: int) -> TextPiece:
        """Take the next token; below ``min_tokens`` stop strings are passed over."""
        self._tokens += 1
        if not self._wanted or (self._skip_special and token in self._special):
            return TextPiece("")
        self._held += self._decoder.decode(self._tokenizer.token_bytes(token))
        if self._tokens <= self._min_tokens:
            return self._release(len(self._held))
        found = [(self._held.find(stop), stop) for stop in self._stops if stop in self._held]
        if found:
            at, stop = min(found, key=lambda f: (f[0], len(f[1])))
            piece = self._release(at + (len(stop) if self._include_stop else 0))
            self._held = ""
            return TextPiece(piece.text, stop)
        return self._release(len(self._held) - self._undecided())

    def flush(self) -> str:
        """The stream ends: what was held back is certain now."""
        self._held += self._decoder.decode(b"", final=True)
        return self._release(len(self._held)).text

    def _release(self, length: int) -> TextPiece:
        text, self._held = self._held[:length], self._held[length:]
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
