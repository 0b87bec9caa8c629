"""Thinking budgets: the engine closes a model's thoughts that grow too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.sampling import TokenGrammar, token_mask
from specdec.core.types import Request
from specdec.models.tokenizer import Tokenizer


class ThinkingBudget:
    """A `TokenGrammar` of an output that may begin with thoughts. Once they are as long as the budget, only the tokens
    that close them are allowed, one after the other. ``answer`` is the grammar of what follows.

    The prompt leaves thoughts open, or the output opens them before it says anything else. With a grammar they hold no
    end token, so that there is an answer.
    """

    error = ""

    def __init__(self, request: Request, tokenizer: Tokenizer, vocab_size: int, answer: TokenGrammar | None) -> None:
        assert tokenizer.thought_marks is not None
        self._opening, self._mark, self._closing = tokenizer.thought_marks
        self._tokenizer, self._answer, self._budget = tokenizer, answer, request.sampling.thinking_budget
        self._over = self._budget + len(self._closing)
        self._spent = 0 if tokenizer.leaves_thoughts_open(request.prompt_ids) else -1  # -1: they are not open yet
        ends = [token for token in tokenizer.eos_ids if token < vocab_size and answer is not None]
        self._free = token_mask(np.arange(vocab_size), vocab_size) & ~token_mask(ends, vocab_size)
        self._only = {token: token_mask([token], vocab_size) for token in (self._opening, *self._closing)}

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``; none after a token that should have closed the thoughts and does not."""
        spent, begin = self._walk(path)
        if self._answer is not None and spent < 0:
            return self._answer.mask(()) | self._only[self._opening]
        if self._answer is not None and spent >= self._over:
            return self._answer.mask(path[begin:])
        if not self._budget <= spent < self._over:
            return self._free
        due = self._closing[spent - self._budget]
        return self._only[due] if begin == len(path) else np.zeros_like(self._free)

    def commit(self, tokens: Iterable[int]) -> TokenGrammar | None:
        """Advance by ``tokens``; returns the grammar of what follows."""
        taken = tuple(tokens)
        self._spent, begin = self._walk(taken)
        if self._spent < self._over:
            return self
        return None if self._answer is None else self._answer.commit(taken[begin:])

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` of the tokens that must follow ``path`` to close the thoughts; often none."""
        spent, _ = self._walk(path)
        return [*self._closing[spent - self._budget :][:limit]] if spent >= self._budget else []

    def _walk(self, path: Sequence[int]) -> tuple[int, int]:
        """Tokens of the thoughts after ``path``, and where in it the answer begins, or a token that may not follow."""
        spent = self._spent
        for at, token in enumerate(path):
            if spent >= self._over:
                return spent, at
            if spent < 0:
                if token == self._opening:
                    spent = 0
                elif self._answer is not None or self._tokenizer.token_bytes(token).strip():
                    return self._over, at
            elif spent < self._budget:
                spent = self._over if token == self._mark else spent + 1
            elif token == self._closing[spent - self._budget]:
                spent += 1
            else:
                return spent, at
        return spent, len(path)
