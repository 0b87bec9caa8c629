"""Thinking budgets: the engine ends a model's thoughts that grow too long."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from specdec.core.sampling import token_mask
from specdec.core.types import Request
from specdec.errors import InvalidRequestError
from specdec.grammar.state import GrammarState
from specdec.models.tokenizer import Tokenizer


class ThinkingBudget:
    """A `TokenGrammar` of an output that may begin with thoughts: after so many tokens only those that close the
    thoughts are allowed, one after the other. ``answer`` is the grammar of what follows.

    Thoughts are open in the prompt, or the output opens them before it says anything else. With a grammar they hold no
    end token, so that there is an answer.

    Raises:
        InvalidRequestError: ``sampling.allowed_token_ids`` does not hold the tokens that close thoughts.
    """

    def __init__(self, request: Request, tokenizer: Tokenizer, vocab_size: int, answer: GrammarState | None) -> None:
        assert tokenizer.thought_marks is not None
        self._opening, self._mark, self._closing = tokenizer.thought_marks
        allowed = request.sampling.allowed_token_ids
        if allowed and not set(self._closing) <= set(allowed):
            ids = ", ".join(map(str, self._closing))
            problem = f"with a thinking budget it must hold the tokens that close thoughts ({ids}); add them"
            raise InvalidRequestError.of("sampling.allowed_token_ids", problem)
        self._tokenizer, self._answer = tokenizer, answer
        self._budget = request.sampling.thinking_budget
        self._over = self._budget + len(self._closing)
        self._spent = 0 if tokenizer.leaves_thoughts_open(request.prompt_ids) else -1  # -1: they are not open yet
        ends = () if answer is None else tokenizer.eos_ids
        self._free = token_mask(np.setdiff1d(np.arange(vocab_size), ends), vocab_size)
        self._only = {token: token_mask([token], vocab_size) for token in (self._opening, *self._closing)}

    @property
    def error(self) -> str:
        """As `TokenGrammar`."""
        return "" if self._answer is None else self._answer.error

    def mask(self, path: Sequence[int]) -> NDArray[np.uint32]:
        """Allowed tokens after ``path``; none after tokens that do not close thoughts as they must."""
        spent, begin = self._walk(path)
        if spent < 0 and self._answer is not None:
            return self._answer.mask(()) | self._only[self._opening]
        if spent >= self._over and self._answer is not None:
            return self._answer.mask(path[begin:])
        if not self._budget <= spent < self._over:
            return self._free
        due = self._closing[spent - self._budget]
        return self._only[due] if begin == len(path) else np.zeros_like(self._free)

    def commit(self, tokens: Iterable[int]) -> ThinkingBudget | GrammarState | None:
        """Advance by ``tokens``; returns the grammar of what follows."""
        taken = tuple(tokens)
        self._spent, begin = self._walk(taken)
        if self._spent < self._over:
            return self
        return None if self._answer is None else self._answer.commit(taken[begin:])

    def forced(self, path: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` of the tokens that close the thoughts, if they must follow ``path``."""
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
