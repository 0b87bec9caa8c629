"""What a request calls a grammar, written as llguidance takes it."""

from __future__ import annotations

import json
from typing import Any

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark, is_lark_syntax

from specdec.types import GrammarKind, GrammarParams

MAX_GBNF_RULES = 512  # the library's converter takes time quadratic in them: 0.1 s for these, seconds for thousands


def grammar_source(params: GrammarParams) -> str:
    """The grammar's text for ``LLMatcher``. Not yet checked beyond what is said here.

    - JSON_SCHEMA: a JSON object (draft 2020-12 as far as llguidance goes). White space between tokens is free; with
      ``"x-guidance": {"whitespace_flexible": false}`` in the schema there is none, and more of the output is forced.
    - JSON_OBJECT: any JSON object.
    - REGEX: the whole output, in the syntax of Rust's ``regex`` crate without anchors and look-around.
    - EBNF: llguidance's Lark dialect (a line ``start: ...``), or else llama.cpp's GBNF (``root ::= ...``).
    - CHOICE: a JSON array of strings, of which the output is one.

    Raises:
        ValueError: the text is not what its kind asks for.
    """
    if params.kind is GrammarKind.JSON_OBJECT:
        return str(LLMatcher.grammar_from_json_schema('{"type": "object"}'))
    if params.kind is GrammarKind.JSON_SCHEMA:
        if not isinstance(_parsed(params.text), dict):
            raise ValueError("a JSON schema must be a JSON object")
        return str(LLMatcher.grammar_from_json_schema(params.text))
    if params.kind is GrammarKind.REGEX:
        return str(LLMatcher.grammar_from_regex(params.text))
    if params.kind is GrammarKind.CHOICE:
        return _choice(_parsed(params.text))
    if not is_lark_syntax(params.text) and params.text.count("::=") > MAX_GBNF_RULES:
        raise ValueError(f"more than {MAX_GBNF_RULES} GBNF rules; write it in Lark syntax (start: ...)")
    return str(LLMatcher.grammar_from_lark(any_to_lark(params.text)))


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
