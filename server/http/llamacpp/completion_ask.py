"""What a body of /completion asks for."""

from __future__ import annotations

import dataclasses
from typing import Any

from server.frontend import Frontend
from server.http.body import Body
from server.http.call import Call
from server.http.fields.common import read_common
from server.http.llamacpp.ask import Ask
from server.http.llamacpp.ask_reader import read_ask
from server.http.llamacpp.logit_bias import read_logit_bias
from server.http.llamacpp.probabilities import read_output
from server.http.llamacpp.sampling import read_llama_sampling
from server.http.llamacpp.stopping import read_llama_grammar, read_llama_stopping
from server.http.validation import validate
from specdec.types import Request

_RULE = "must be text, a list of token ids, or a list of both"


async def read_completion(call: Call) -> Ask:
    """What ``call`` asks for.

    Raises:
        RequestError: it can not be served; every bad field is named.
    """
    body, frontend = call.body(), call.face.frontend
    call.face.check_model(body.text("model"))
    call.field_names["prompt.token_ids"] = "prompt"
    ids = await _prompt(body, frontend)
    stopping = read_llama_stopping(body, frontend.loaded_tokenizer)
    bias = await read_logit_bias(body, frontend)
    sampling = dataclasses.replace(read_llama_sampling(body), logit_bias=bias)
    request = Request(
        request_id=f"cmpl-{call.request_id}",
        prompt_ids=ids or (0,),  # a stand-in where the prompt is bad: the other fields are checked all the same
        sampling=sampling,
        output=read_output(body),
        stopping=stopping,
        grammar=read_llama_grammar(body),
        **read_common(call, body),
    )
    ask = read_ask(body, request, stopping.max_tokens)
    body.seen.check(bool(ids) or bool(body.seen.violations), "prompt", "must amount to at least one token")
    validate([request], call.face.info, body.seen)
    return ask


async def _prompt(body: Body, frontend: Frontend) -> tuple[int, ...]:
    """Special tokens spelled out in a text are read as such, and only its first piece begins as a text does."""
    given: Any = body.raw("prompt")
    pieces = [given] if isinstance(given, str) else given
    good = isinstance(pieces, list) and all(isinstance(p, str) or type(p) is int for p in pieces)
    if not good:
        body.refuse("prompt", _RULE)
        return ()
    if len(pieces) > 1 and all(isinstance(piece, str) for piece in pieces):
        body.refuse("prompt", "is several prompts; send each in a call of its own, or all to /v1/completions")
        return ()
    ids: list[int] = []
    for i, piece in enumerate(pieces):
        if isinstance(piece, str):
            ids += await frontend.encode(piece, add_special=i == 0, parse_special=True)
        else:
            ids.append(piece)
    return tuple(ids)
