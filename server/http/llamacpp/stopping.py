"""When llama.cpp's clients want an answer to end."""

from __future__ import annotations

import dataclasses

from server.http.body import Body
from server.http.fields.stopping import MAX_TOKENS, read_stopping
from server.http.json_codec import write_json
from server.tokenizer_protocol import TokenizerLike
from specdec.types import GrammarKind, GrammarParams, StoppingParams, TextRules


def read_llama_stopping(body: Body, tokenizer: TokenizerLike) -> StoppingParams:
    """``n_predict`` (negative: up to the context limit), ``stop``, ``n_indent`` (before a line indented less) and
    ``t_max_predict_ms``, which counts from the first token and lets the line be ended. A limit to the prompt's time
    (``t_max_prompt_ms``) is none to llama.cpp either: a warm-up that gives 1 ms wants its prompt computed."""
    limit = body.integer("n_predict", -MAX_TOKENS, MAX_TOKENS)
    body.names["stopping.max_tokens"] = body.path("n_predict")
    stopping = read_stopping(body, tokenizer, None if limit is None or limit < 0 else limit)
    indent = body.integer("n_indent", 0, MAX_TOKENS)
    if indent:
        stopping = dataclasses.replace(stopping, rules=TextRules(min_indent=indent))
    most_ms = body.number("t_max_predict_ms")
    if most_ms is None or most_ms <= 0:
        return stopping
    return dataclasses.replace(stopping, decode_limit_s=most_ms / 1e3, finish_line=True)


def read_llama_grammar(body: Body) -> GrammarParams | None:
    """``grammar`` as GBNF, or ``json_schema``."""
    text, schema = body.text("grammar"), body.value("json_schema")
    if not text and schema is None:
        return None
    if text and schema is not None:
        body.refuse("json_schema", "grammar is given too; give one of them")
    if text:
        return GrammarParams(GrammarKind.EBNF, text)
    body.names["grammar"] = body.path("json_schema")
    if not isinstance(schema, dict):
        body.refuse("json_schema", "must be a JSON schema")
        return None
    return GrammarParams(GrammarKind.JSON_SCHEMA, write_json(schema).decode())
