"""Which tokens can spell a text: all of it, a beginning of it, or it and more."""

from __future__ import annotations

from bisect import bisect_left

import numpy as np
from numpy.typing import NDArray

from specdec.models.tokenizer import Tokenizer


class TokenSpelling:
    """The text tokens of a vocabulary in the order of their bytes. ``vocab_size``: columns of the logits."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        spelled = sorted(
            (data, token)
            for token in range(vocab_size)
            if token not in tokenizer.special_ids and (data := tokenizer.token_bytes(token))
        )
        self._bytes = [data for data, _ in spelled]
        self._ids = np.asarray([token for _, token in spelled], np.int64)

    def bytes_of(self, token: int) -> bytes:
        """The bytes of ``token``; none where it is no text."""
        return b"" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)

    def mask(self, text: bytes) -> NDArray[np.uint32]:
        """Tokens that begin ``text``, are it, or begin with it: uint32 [ceil(vocab / 32)], bit v & 31 of word v >> 5.
        Every token where ``text`` is empty."""
        allowed = np.zeros(-(-self._vocab_size // 32) * 32, np.uint8)
        if not text:
            allowed[: self._vocab_size] = 1
        else:
            allowed[self._ids[self._starting_with(text)]] = 1
            for size in range(1, len(text)):
                allowed[self._ids[self._equal_to(text[:size])]] = 1
        return np.packbits(allowed, bitorder="little").view("<u4").astype(np.uint32)

    def _starting_with(self, text: bytes) -> slice:
        # The first bytes that come after everything that starts with `text`
        stem = text.rstrip(b"\xff")
        end = len(self._bytes) if not stem else bisect_left(self._bytes, stem[:-1] + bytes([stem[-1] + 1]))
        return slice(bisect_left(self._bytes, text), end)

    def _equal_to(self, text: bytes) -> slice:
        return slice(bisect_left(self._bytes, text), bisect_left(self._bytes, text + b"\0"))
