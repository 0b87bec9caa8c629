"""Token healing: the output begins with a given text, in whichever tokens spell that text and what follows."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.sampling import token_mask
from specdec.models.tokenizer import Tokenizer


class TokenSpelling:
    """The text tokens of a vocabulary, sorted by their bytes. vocab_size: columns of the logits."""

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
        """The bytes of ``token``; empty for a special token."""
        return b"" if token in self._tokenizer.special_ids else self._tokenizer.token_bytes(token)

    def mask(self, text: bytes) -> NDArray[np.uint32]:
        """The `token_mask` of tokens that are a prefix of ``text`` or begin with it; of all if it is empty."""
        if not text:
            return token_mask(np.arange(self._vocab_size), self._vocab_size)
        places = [self._starting_with(text), *(self._equal_to(text[:size]) for size in range(1, len(text)))]
        return token_mask(np.concatenate([self._ids[place] for place in places]), self._vocab_size)

    def _starting_with(self, text: bytes) -> slice:
        # End: the first bytes after everything that starts with `text`.
        stem = text.rstrip(b"\xff")
        end = len(self._bytes) if not stem else bisect_left(self._bytes, stem[:-1] + bytes([stem[-1] + 1]))
        return slice(bisect_left(self._bytes, text), end)

    def _equal_to(self, text: bytes) -> slice:
        return slice(bisect_left(self._bytes, text), bisect_left(self._bytes, text + b"\0"))


class TokenHealing:
    """A `TokenGrammar` of the first tokens: they spell ``start``, and the last of them may extend beyond it.

    A prompt may end within what is one token with what follows: "ret" before "urn". Its tokens would be ones that the
    model never saw in such a place. So the prompt ends before that word, and the output spells it again.
    """

    error = ""

    def __init__(self, spelling: TokenSpelling, start: str) -> None:
        self._spelling, self._rest = spelling, start.encode()
        self._masks: dict[bytes | None, NDArray[np.uint32]] = {}

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``; none after tokens that spell something else."""
        rest = self._after(path)
        if rest not in self._masks:
            mask = self._spelling.mask(rest or b"")
            self._masks[rest] = np.zeros_like(mask) if rest is None else mask
        return self._masks[rest]

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """None: the text is a few tokens at most."""
        return ()

    def commit(self, tokens: Iterable[int]) -> TokenHealing | None:
        """Advance by ``tokens``; None: the text is spelled."""
        self._rest = self._after(tokens) or b""
        return self if self._rest else None

    def _after(self, path: Iterable[int]) -> bytes | None:
        """The text still to be spelled after ``path``; None if the path spells something else."""
        rest = self._rest
        for token in path:
            if not rest:
                break
            data = self._spelling.bytes_of(token)
            if data and rest.startswith(data):
                rest = rest[len(data) :]
            elif data.startswith(rest):
                rest = b""
            else:
                return None
        return rest
