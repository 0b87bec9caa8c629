"""The vocabulary in the form llguidance reads: bytes of every token, and how text is split into tokens."""

from __future__ import annotations

from functools import cached_property

from specdec.models.tokenizer import Tokenizer

_GUARD = "\n"  # a character that no tokenizer strips, merges with a space it puts before a text, or leaves out


class GrammarVocabulary:
    """What ``llguidance.LLTokenizer`` asks of a tokenizer; the attribute names are the library's.

    tokens: bytes by id, [vocab_size]; empty, and so never allowed, for padding ids that no token stands for. They
    are the bytes the text of an answer is made of (`Tokenizer.token_bytes`), so a grammar constrains what the caller
    reads. special_token_ids: those a grammar allows only where it names them. ``eos_ids``: end tokens, not empty.
    """

    is_tokenizer_wrapper = True

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_ids: tuple[int, ...]) -> None:
        self._tokenizer = tokenizer
        self.tokens = [tokenizer.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in tokenizer.special_ids | set(eos_ids) if token < vocab_size)
        self.eos_token_id, self.bos_token_id = eos_ids[0], None

    def __call__(self, text: str) -> list[int]:
        """Token ids of ``text`` as it would stand inside an output, whose bytes are exactly those of ``text``.

        The library forces these tokens without trying them, so what a tokenizer puts before a text or normalises
        must not show.
        """
        ids = self._tokenizer.encode(text, add_special=False)
        if self._spells(ids, text):
            return ids
        guard = self._tokenizer.encode(_GUARD, add_special=False)
        ids = self._tokenizer.encode(_GUARD + text, add_special=False)[len(guard) :]
        return ids if self._spells(ids, text) else self._longest_matches(text.encode())

    def _spells(self, ids: list[int], text: str) -> bool:
        return b"".join(self._tokenizer.token_bytes(token) for token in ids) == text.encode()

    def _longest_matches(self, rest: bytes) -> list[int]:
        ids = []
        while rest:
            size = next((size for size in range(len(rest), 0, -1) if rest[:size] in self._by_bytes), 0)
            if size == 0:
                break  # no token holds this byte, so nothing can be forced here, nor said
            ids.append(self._by_bytes[rest[:size]])
            rest = rest[size:]
        return ids

    @cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        """Text tokens by their bytes, the lowest id of equal ones."""
        special = set(self.special_token_ids)
        return {self.tokens[t]: t for t in reversed(range(len(self.tokens))) if t not in special and self.tokens[t]}
