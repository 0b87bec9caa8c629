"""Biases of tokens, as llama.cpp's clients write them."""

from __future__ import annotations

import math
from typing import Any

from server.frontend import Frontend
from server.http.body import Body
from specdec.engine.validation import MAX_BIAS

MAX_TEXTS = 256  # each is tokenised
_RULE = "must be a list of pairs, or an object, of a token id or a text and a number or false"


async def read_logit_bias(body: Body, frontend: Frontend) -> tuple[tuple[int, float], ...]:
    """``logit_bias``: what is added to the logits of a token id, or of every token of a text; false: never to be said.

    Biases of one token add up.
    """
    pairs = _pairs(body.raw("logit_bias"))
    if pairs is None or not all(_good(*pair) for pair in pairs):
        body.refuse("logit_bias", _RULE)
        return ()
    if sum(isinstance(what, str) for what, _ in pairs) > MAX_TEXTS:
        body.refuse("logit_bias", f"at most {MAX_TEXTS} texts; give token ids instead, which /tokenize tells")
        return ()
    biases: dict[int, float] = {}
    never: set[int] = set()
    for what, bias in pairs:
        for token in [what] if isinstance(what, int) else await frontend.encode(what, add_special=False):
            biases[token] = biases.get(token, 0.0) + bias
            if bias is False:
                never.add(token)
    return tuple((token, -MAX_BIAS if token in never else bias) for token, bias in sorted(biases.items()))


def _pairs(given: Any) -> list[tuple[Any, Any]] | None:
    """None where it has another form. An object's keys are ids where they are numbers in decimal."""
    if isinstance(given, dict):
        return [(int(name) if _is_id(name) else name, bias) for name, bias in given.items()]
    if given is None:
        return []
    if not isinstance(given, list) or not all(isinstance(pair, list) and len(pair) == 2 for pair in given):
        return None
    return [(what, bias) for what, bias in given]


def _is_id(name: str) -> bool:
    return name.isascii() and name.isdigit() and len(name) < 10


def _good(what: Any, bias: Any) -> bool:
    number = isinstance(bias, int | float) and not isinstance(bias, bool) and math.isfinite(bias)
    return (type(what) is int or isinstance(what, str)) and (number or bias is False)
