"""Token healing: the output begins with a given text, in whichever tokens spell that text and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer

from specdec.grammar.state import GrammarState, Mask, any_token
from specdec.models.tokenizer import Tokenizer


def healing_matcher(start: str, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher of texts that begin with ``start``. It takes 1 ms to build, and a `TokenHealing` copies it."""
    # With `no_forcing` any tokens may spell the text, not only the tokenizer's own
    lark = f'%llguidance {{"no_forcing": true}}\nstart: TEXT\nTEXT: {json.dumps(start)} /(?s:.*)/'
    return LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)


class TokenHealing:
    """A `TokenGrammar` of the first tokens: they spell ``start``, and the last of them may extend beyond it.

    A prompt may end within what is one token with what follows: "ret" before "urn". Its tokens would be ones that the
    model never saw in such a place. So the prompt ends before that word, and the output spells it again.

    matcher: the `healing_matcher` of ``start``.
    """

    error = ""

    def __init__(self, start: str, matcher: LLMatcher, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._state, self._rest = GrammarState(matcher, False, (), vocab_size), start.encode()
        self._tokenizer, self._any = tokenizer, any_token(vocab_size)

    def mask(self, path: Sequence[int]) -> Mask:
        """Allowed tokens after ``path``; none after tokens that spell something else, all once the text is spelled."""
        return self._any if self._bytes_of(path).startswith(self._rest) else self._state.mask(path)

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """None: the text is a few tokens at most."""
        return ()

    def commit(self, tokens: Iterable[int]) -> TokenHealing | None:
        """Advance by ``tokens``; None: the text is spelled."""
        taken = tuple(tokens)
        self._rest = self._rest[len(self._bytes_of(taken)) :]
        if not self._rest:
            return None
        self._state.commit(taken)
        return self

    def _bytes_of(self, tokens: Iterable[int]) -> bytes:
        """The text of ``tokens``. A special token is no text; it has a byte that no text has."""
        special, bytes_of = self._tokenizer.special_ids, self._tokenizer.token_bytes
        return b"".join(b"\xff" if token in special else bytes_of(token) for token in tokens)
