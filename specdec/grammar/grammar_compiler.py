"""Compiles the grammars of requests, and remembers the last ones."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.errors import FieldViolation, InvalidRequestError, QueueFullError
from specdec.grammar.bounded_call import BoundedCall
from specdec.grammar.grammar_source import grammar_source
from specdec.grammar.grammar_state import GrammarState
from specdec.grammar.grammar_vocabulary import GrammarVocabulary
from specdec.models.tokenizer import Tokenizer
from specdec.types import GrammarKind, GrammarParams

COMPILE_SECONDS = 2.0  # ordinary grammars take milliseconds; an engine that compiles does not step
STACK_BYTES = 256 << 20  # rules that lead to rules recurse: 1,000 nested references of a schema exceed 8 MiB
MAX_OVERDUE = 2  # calls that went on beyond the limit, and can not be stopped
OVERDUE_RETRY_S = 30.0
CACHED = 64
MAX_MESSAGE = 240
_HINTS = {
    GrammarKind.JSON_SCHEMA: "correct or simplify the schema",
    GrammarKind.JSON_OBJECT: "send a schema instead",
    GrammarKind.REGEX: "correct or simplify the expression (Rust regex syntax)",
    GrammarKind.EBNF: "correct or simplify the grammar (Lark with a start rule, or GBNF with a root rule)",
    GrammarKind.CHOICE: 'send a JSON array of strings, such as ["yes", "no"]',
}


class GrammarCompiler:
    """Makes a `GrammarState` of what a request asks for. Not thread-safe: it belongs to the engine's thread.

    The library's view of the vocabulary (a second or so for 150,000 tokens) is built for the first grammar, or by
    `prepare`. vocab_size: columns of the logits; ids beyond the tokenizer's are never allowed.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, seconds: float = COMPILE_SECONDS) -> None:
        self._tokenizer, self._vocab_size, self._seconds = tokenizer, vocab_size, seconds
        self._eos_ids = tuple(token for token in tokenizer.eos_ids if 0 <= token < vocab_size)
        self._compiled: OrderedDict[GrammarParams, Any] = OrderedDict()
        self._overdue: list[BoundedCall[Any]] = []

    def prepare(self) -> None:
        """Build now what the first grammar would build."""
        if self._eos_ids:
            _ = self._vocabulary

    def compile(self, params: GrammarParams, allowed_token_ids: Sequence[int] = ()) -> GrammarState:
        """A fresh state at the start of the output; one per sample. Compiling the same grammar again costs nothing.

        allowed_token_ids: the request's own, to refuse at once what could not begin or end together with them.

        Raises:
            InvalidRequestError: ``grammar`` is malformed, too complex, or matches nothing the model can say;
                ``sampling.allowed_token_ids`` holds no end token or none that can begin.
            QueueFullError: too many grammars that are too complex still keep the compiler busy.
        """
        if not self._eos_ids:
            raise _refusal("grammar", "the model names no end token, so the output could not end; leave it out")
        state = GrammarState(self._origin(params), self._eos_ids, self._vocab_size)
        _check_beginning(state, allowed_token_ids, self._eos_ids)
        return state

    @cached_property
    def _vocabulary(self) -> Any:
        wrapped = GrammarVocabulary(self._tokenizer, self._vocab_size, self._eos_ids)
        return LLTokenizer(wrapped, n_vocab=self._vocab_size, eos_token=list(self._eos_ids))

    def _origin(self, params: GrammarParams) -> Any:
        """The matcher at the output's start, never advanced: states are copies of it."""
        found = self._compiled.get(params)
        if found is None:
            try:
                found = self._build(params)
            except (ValueError, TimeoutError, RuntimeError) as error:
                message = _shortened(str(error))
                raise _refusal("grammar", f"{message}; {_HINTS[params.kind]}") from None
            self._compiled[params] = found
            if len(self._compiled) > CACHED:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(params)
        return found

    def _build(self, params: GrammarParams) -> Any:
        self._overdue = [call for call in self._overdue if call.running]
        if len(self._overdue) >= MAX_OVERDUE:
            raise QueueFullError(MAX_OVERDUE, OVERDUE_RETRY_S)
        vocabulary = self._vocabulary
        call = BoundedCall(lambda: _matcher(params, vocabulary), STACK_BYTES)
        try:
            return call.result(self._seconds)
        except TimeoutError:
            self._overdue.append(call)
            raise TimeoutError(f"too complex: not compiled within {self._seconds:g} s") from None


def _matcher(params: GrammarParams, vocabulary: Any) -> Any:
    """Compiled, with its first mask computed: the lexer's first states, which all copies then share."""
    limits = LLParserLimits(verbose_errors=False)
    matcher = LLMatcher(vocabulary, grammar_source(params), log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        message = matcher.get_error()
        raise ValueError("nothing matches it" if message.startswith("NoExtension") else message)
    return matcher


def _check_beginning(state: GrammarState, allowed: Sequence[int], eos_ids: Sequence[int]) -> None:
    mask = state.mask(())
    if not mask.any():
        raise _refusal("grammar", "no token of the model can begin such an output; loosen it")
    if not allowed:
        return
    if not set(allowed) & set(eos_ids):
        ends = ", ".join(map(str, eos_ids))
        raise _refusal("sampling.allowed_token_ids", f"with a grammar it must hold an end token ({ends}); add it")
    ids = np.asarray(allowed, np.int64)
    ids = ids[(ids >= 0) & (ids < 32 * mask.size)]
    if not (mask[ids >> 5] >> (ids & 31).astype(np.uint32) & 1).any():
        raise _refusal("sampling.allowed_token_ids", "none of them can begin an output of the grammar; allow more")


def _refusal(name: str, description: str) -> InvalidRequestError:
    return InvalidRequestError([FieldViolation(name, description)])


def _shortened(message: str) -> str:
    flat = " ".join(message.replace("<non-verbose/>", "").split())
    return flat if len(flat) <= MAX_MESSAGE else flat[:MAX_MESSAGE] + "..."
