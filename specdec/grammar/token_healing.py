"""Token healing: the output begins with a given text, in whichever tokens spell that text and what follows."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from llguidance import LLMatcher, LLTokenizer

from specdec.grammar.state import GrammarState, Mask, any_token
from specdec.models.tokenizer import Tokenizer


class TokenHealing:
    """A `TokenGrammar` of the first tokens: they spell ``start``, and the last of them may extend beyond it.

    A prompt may end within what is one token with what follows: "ret" before "urn". Its tokens would be ones that the
    model never saw in such a place. So the prompt ends before that word, and the output spells it again.
    """

    error = ""

    def __init__(self, start: str, vocabulary: LLTokenizer, tokenizer: Tokenizer, vocab_size: int) -> None:
        # With `no_forcing` any tokens may spell the text, not only the tokenizer's own
        lark = f'%llguidance {{"no_forcing": true}}\nstart: TEXT\nTEXT: {json.dumps(start)} /(?s:.*)/'
        matcher = LLMatcher(vocabulary, LLMatcher.grammar_from_lark(lark), log_level=0)
        self._state, self._left = GrammarState(matcher, False, (), vocab_size), len(start.encode())
        self._tokenizer, self._any = tokenizer, any_token(vocab_size)

    def mask(self, path: Sequence[int]) -> Mask:
        """Allowed tokens after ``path``; none after tokens that spell something else, all once the text is spelled."""
        return self._state.mask(path) if self._length(path) < self._left else self._any

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """None: the text is a few tokens at most."""
        return ()

    def commit(self, tokens: Iterable[int]) -> TokenHealing | None:
        """Advance by ``tokens``; None: the text is spelled."""
        taken = tuple(tokens)
        self._left -= self._length(taken)
        if self._left <= 0:
            return None
        self._state.commit(taken)
        return self

    def _length(self, tokens: Iterable[int]) -> int:
        """Bytes of ``tokens``."""
        return sum(len(self._tokenizer.token_bytes(token)) for token in tokens)
