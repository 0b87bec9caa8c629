"""Compiles the grammars of requests to llguidance matchers, and remembers the last ones."""

from __future__ import annotations

import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Generic, TypeVar

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from specdec.core.types import GrammarKind, GrammarParams
from specdec.errors import FieldViolation, InvalidRequestError, QueueFullError
from specdec.grammar.state import GrammarState
from specdec.grammar.token_healing import TokenSpelling
from specdec.models.tokenizer import Tokenizer

Result = TypeVar("Result")


class BoundedCall(Generic[Result]):
    """One call on a thread of its own, with a stack of ``stack_bytes`` (address space; used only as deep as it goes).

    Work that can not be interrupted goes on after `result` gave up; ``running`` tells.
    """

    def __init__(self, work: Callable[[], Result], stack_bytes: int) -> None:
        self._work = work
        self._results: list[Result] = []
        self._error: str | None = None
        self._thread = threading.Thread(target=self._run, name="specdec-grammar", daemon=True)
        before = threading.stack_size(stack_bytes)
        try:
            self._thread.start()
        finally:
            threading.stack_size(before)

    @property
    def running(self) -> bool:
        """Whether the work is not yet done."""
        return self._thread.is_alive()

    def result(self, seconds: float) -> Result:
        """What the work returned.

        Raises:
            TimeoutError: it is not done within ``seconds``.
            ValueError: it raised; with that error's message.
        """
        self._thread.join(seconds)
        if self._thread.is_alive():
            raise TimeoutError(f"not done within {seconds:g} s")
        if self._error is not None:
            raise ValueError(self._error)
        return self._results[0]

    def _run(self) -> None:
        try:
            self._results.append(self._work())
        except BaseException as error:  # a panic of Rust code is no Exception
            self._error = str(error) or type(error).__name__


# Bounded: a model that is unsure may go on with blanks for ever, since they are always allowed.
WHITESPACE = r" |\n{1,2}[ \t]{0,40}"
MAX_GBNF_RULES = 512  # the library's converter takes time quadratic in them: 0.1 s for these, seconds for thousands


def grammar_source(params: GrammarParams) -> str:
    """The grammar's text for ``LLMatcher``. Not yet checked beyond what is said here.

    - JSON_SCHEMA: a JSON object (draft 2020-12 as far as llguidance goes). Between tokens there may be a space, or line
      breaks and an indentation (`WHITESPACE`); with ``"x-guidance": {"whitespace_flexible": false}`` in the schema
      there is nothing, and more of the output is forced; ``"whitespace_pattern"`` there puts another rule in its place.
    - JSON_OBJECT: any JSON object, with the same white space.
    - REGEX: the whole output, in the syntax of Rust's ``regex`` crate without anchors and look-around.
    - EBNF: llguidance's Lark dialect (a line ``start: ...``), or else llama.cpp's GBNF (``root ::= ...``).
    - CHOICE: a JSON array of strings, of which the output is one.

    Raises:
        ValueError: the text is not what its kind asks for.
    """
    if params.kind is GrammarKind.JSON_OBJECT:
        return _json('{"type": "object"}', {})
    if params.kind is GrammarKind.JSON_SCHEMA:
        schema = _parsed(params.text)
        if not isinstance(schema, dict):
            raise ValueError("a JSON schema must be a JSON object")
        return _json(params.text, schema.get("x-guidance"))
    if params.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(params.text))
    if params.kind is GrammarKind.CHOICE:
        return _choice(_parsed(params.text))
    if not is_lark_syntax(params.text) and params.text.count("::=") > MAX_GBNF_RULES:
        raise ValueError(f"more than {MAX_GBNF_RULES} GBNF rules; write it in Lark syntax (start: ...)")
    return str(LLMatcher.grammar_from_lark(any_to_lark(params.text)))


def _json(schema: str, options: Any) -> str:
    compact = isinstance(options, dict) and options.get("whitespace_flexible") is False
    # A pattern goes before that option, also where it is only a default.
    return str(LLMatcher.grammar_from_json_schema(schema, None if compact else {"whitespace_pattern": WHITESPACE}))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice must be a JSON array of at least one string")
    try:
        literals = [_literal(choice) for choice in dict.fromkeys(choices)]
    except UnicodeEncodeError:
        raise ValueError("a choice holds half a surrogate pair, which UTF-8 can not say") from None
    # One terminal: as alternatives of a rule, thousands of choices would exceed the parser's items of one row.
    return str(LLMatcher.grammar_from_lark("start: CHOICE\nCHOICE: " + " | ".join(literals)))


def _literal(text: str) -> str:
    text.encode()
    return json.dumps(text)


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

    @cached_property
    def spelling(self) -> TokenSpelling:
        """The table of token healing."""
        return TokenSpelling(self._tokenizer, self._vocab_size)

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
