"""The process that checks grammars before the engine compiles them: ``python -m specdec.grammar.check_process``.

Some short grammars keep the library busy for hours, or take all memory, and no call of it can be interrupted. So each
grammar is first compiled here, over a vocabulary of single bytes, by a process that limits on its own processor time
and address space end. The first line of its input is the vocabulary, each further line a grammar; it answers each with
a line, or dies. It imports neither torch nor numpy.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
import threading
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from specdec.core.types import JSON_WHITESPACE, GrammarKind, GrammarParams
from specdec.grammar.gbnf import gbnf_to_lark, is_gbnf

STACK_BYTES = 256 << 20
"""Stack of a thread that compiles: 1,000 nested references of a schema exceed the usual 8 MiB."""
MAX_ADDRESS_BYTES = 1 << 30
"""Address space of the process, `STACK_BYTES` included. Ordinary grammars take a few MiB."""
STEP_LEXER_FUEL, STEP_MAX_ITEMS = 200_000, 10_000
"""The library's units of work for one mask. Within them, the most expensive grammars known take 2 ms for a mask, and a
compiled grammar keeps 1 MiB besides about 100 times its text."""
NICENESS = 10
"""Added to the process's, so that it does not take the processor from the engine's steps."""


def grammar_source(params: GrammarParams) -> str:
    """The text for ``LLMatcher``; most errors in it show only there.

    - JSON_SCHEMA: a JSON object (draft 2020-12 as far as llguidance supports it). Between tokens there may be
      `JSON_WHITESPACE`. ``"x-guidance": {"whitespace_flexible": false}`` in the schema allows none, so that more of the
      output is forced; ``"whitespace_pattern"`` replaces it.
    - JSON_OBJECT: any JSON object, with the same white space.
    - REGEX: the whole output, in the syntax of Rust's ``regex`` crate without anchors and look-around.
    - EBNF: llguidance's Lark dialect (a line ``start: ...``), else llama.cpp's GBNF (``root ::= ...``).
    - CHOICE: a JSON array of strings, of which the output is one.

    Raises:
        ValueError: the text is malformed.
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
    return str(LLMatcher.grammar_from_lark(gbnf_to_lark(params.text) if is_gbnf(params.text) else params.text))


def _json(schema: str, options: Any) -> str:
    compact = isinstance(options, dict) and options.get("whitespace_flexible") is False
    # A pattern overrides `whitespace_flexible`, even if it is only a default.
    return str(LLMatcher.grammar_from_json_schema(schema, None if compact else {"whitespace_pattern": JSON_WHITESPACE}))


def _parsed(text: str) -> Any:
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error}") from None


def _choice(choices: Any) -> str:
    if not isinstance(choices, list) or not choices or not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice must be a JSON array of at least one string")
    try:
        "".join(choices).encode()
    except UnicodeEncodeError:
        raise ValueError("a choice holds half a surrogate pair, which UTF-8 cannot express") from None
    # One terminal: as alternatives of a rule, thousands of choices would exceed the parser's items per row.
    literals = " | ".join(map(json.dumps, dict.fromkeys(choices)))
    return str(LLMatcher.grammar_from_lark(f"start: CHOICE\nCHOICE: {literals}"))


def compile_matcher(source: str, vocabulary: LLTokenizer) -> LLMatcher:
    """A matcher at the output's start, with its first mask computed. Releases the interpreter's lock meanwhile.

    Raises:
        ValueError: the grammar is wrong, too complex, or matches nothing.
    """
    limits = LLParserLimits(verbose_errors=False, step_lexer_fuel=STEP_LEXER_FUEL, step_max_items=STEP_MAX_ITEMS)
    matcher = LLMatcher(vocabulary, source, log_level=0, limits=limits)
    if not matcher.is_error():
        matcher.compute_bitmask()  # computes the lexer's first states, which all copies share
    if matcher.is_error():
        message = matcher.get_error()
        raise ValueError("nothing matches it" if message.startswith("NoExtension") else message)
    return matcher


class _ByteVocabulary:
    """A vocabulary of single bytes and the model's special tokens, at ids of the model's vocabulary."""

    is_tokenizer_wrapper = True

    def __init__(self, vocab_size: int, special: dict[int, bytes], eos_id: int) -> None:
        self.special_token_ids = sorted(special)
        self.eos_token_id, self.bos_token_id = eos_id, None
        self._ids = [token for token in range(vocab_size) if token not in special][:256]
        self.tokens = [special.get(token, b"") for token in range(vocab_size)]
        for byte, token in enumerate(self._ids):
            self.tokens[token] = bytes([byte])

    def __call__(self, text: str) -> list[int]:
        return [self._ids[byte] for byte in text.encode() if byte < len(self._ids)]


def _serve() -> None:
    vocab_size, special, eos_ids = json.loads(sys.stdin.readline())
    wrapped = _ByteVocabulary(vocab_size, {int(k): bytes.fromhex(v) for k, v in special.items()}, eos_ids[0])
    vocabulary = LLTokenizer(wrapped, n_vocab=vocab_size, eos_token=eos_ids)
    for line in sys.stdin:
        kind, text, cpu_seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, cpu_seconds)  # its signal ends the process
        try:
            source = grammar_source(GrammarParams(GrammarKind(kind), text))
            compile_matcher(source, vocabulary)
            answer = {"source": source}
        except BaseException as error:  # a panic of Rust code is no Exception
            answer = {"error": str(error) or type(error).__name__}
        signal.setitimer(signal.ITIMER_PROF, 0.0)
        print(json.dumps(answer), flush=True)


def main() -> None:
    """Serve standard input until it ends."""
    os.nice(NICENESS)
    resource.setrlimit(resource.RLIMIT_AS, (MAX_ADDRESS_BYTES, MAX_ADDRESS_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_serve)
    thread.start()
    thread.join()


if __name__ == "__main__":
    main()
