"""The object ``options``: how tokens are chosen, and when to stop."""

from __future__ import annotations

import dataclasses
from typing import Any

from server.http.body import Body
from server.http.fields.sampling import read_sampling
from server.http.fields.stopping import MAX_TOKENS, read_stopping
from server.tokenizer_protocol import TokenizerLike
from specdec.types import SamplingParams, StoppingParams

# What holds where a request says nothing, as Ollama has it.
DEFAULTS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "top_p": 0.9}
_UNLIMITED = -2  # "as much as fits", and -1, "without end", come to the same: the context is the limit
_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "presence_penalty", "frequency_penalty", "logit_bias",
    "allowed_token_ids", "seed",
)  # fmt: skip
_STOPPING = ("min_tokens", "stop", "stop_token_ids")
_INT31 = (1 << 31) - 1


def read_options(body: Body, tokenizer: TokenizerLike) -> tuple[SamplingParams, StoppingParams]:
    """How to choose and when to stop. What only concerns another engine (threads, memory, num_ctx, ...) is ignored."""
    options = body.object("options") or Body({}, body.seen, body.names, f"{body.path('options')}.")
    options.names |= {f"sampling.{name}": options.path(name) for name in _SAMPLING}
    options.names |= {f"stopping.{name}": options.path(name) for name in _STOPPING}
    return _sampling(options), _stopping(options, tokenizer)


def _sampling(options: Body) -> SamplingParams:
    left_out = {name: value for name, value in DEFAULTS.items() if not options.has(name)}
    penalty, window = options.number("repeat_penalty"), options.integer("repeat_last_n", -1, _INT31)
    name = "repeat_penalty" if options.has("repeat_penalty") else "repetition_penalty"
    options.names["sampling.repetition_penalty"] = options.path(name)
    sampling = dataclasses.replace(read_sampling(options, 1), **left_out)
    if window == 0:  # the penalty looks at no token
        penalty = 1.0
    return sampling if penalty is None else dataclasses.replace(sampling, repetition_penalty=penalty)


def _stopping(options: Body, tokenizer: TokenizerLike) -> StoppingParams:
    limit = options.integer("num_predict", _UNLIMITED, MAX_TOKENS)
    options.names["stopping.max_tokens"] = options.path("num_predict")
    stopping = read_stopping(options, tokenizer, None if limit is None or limit < 0 else limit)
    return dataclasses.replace(stopping, stop=tuple(filter(None, stopping.stop)))
