"""Thinking budgets: the engine closes a model's thoughts that grow too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.sampling import token_mask
from specdec.core.types import Request
from specdec.grammar.state import any_token
from specdec.models.tokenizer import Tokenizer

_UNLAWFUL = -2  # in place of a number of tokens: the path holds another token where only one is allowed


class ThinkingBudget:
    """A `TokenGrammar` of an output that may begin with thoughts. Once they are as long as the budget, only the tokens
    that close them are allowed, one after the other.

    The prompt leaves thoughts open, or the output opens them before it says anything else.
    """

    error = ""

    def __init__(self, request: Request, tokenizer: Tokenizer, vocab_size: int) -> None:
        assert tokenizer.thought_marks is not None
        self._opening, self._mark, self._closing = tokenizer.thought_marks
        self._tokenizer, self._budget = tokenizer, request.sampling.thinking_budget
        self._over = self._budget + len(self._closing)
        self._spent = 0 if tokenizer.leaves_thoughts_open(request.prompt_ids) else -1  # -1: they are not open yet
        self._free = any_token(vocab_size)
        self._only = {token: token_mask([token], vocab_size) for token in self._closing}

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``; none after a token that should have closed the thoughts and does not."""
        spent = self._after(path)
        if spent == _UNLAWFUL:
            return np.zeros_like(self._free)
        return self._only[self._closing[spent - self._budget]] if self._budget <= spent < self._over else self._free

    def commit(self, tokens: Iterable[int]) -> ThinkingBudget | None:
        """Advance by ``tokens``; None: the thoughts are over, or there are none."""
        self._spent = self._after(tokens)
        return self if self._spent < self._over else None

    def forced(self, path: Sequence[int], limit: int) -> Sequence[int]:
        """At most ``limit`` of the tokens that must follow ``path`` to close the thoughts; often none."""
        spent = self._after(path)
        return self._closing[spent - self._budget :][:limit] if spent >= self._budget else ()

    def _after(self, path: Iterable[int]) -> int:
        """Tokens of the thoughts after ``path``, those that close them included, or `_UNLAWFUL`."""
        spent = self._spent
        for token in path:
            if spent >= self._over:
                break
            if spent < 0:
                if token == self._opening:
                    spent = 0
                elif self._tokenizer.token_bytes(token).strip():
                    spent = self._over
            elif spent < self._budget:
                spent = self._over if token == self._mark else spent + 1
            elif token == self._closing[spent - self._budget]:
                spent += 1
            else:
                return _UNLAWFUL
        return spent
