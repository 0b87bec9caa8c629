"""How likely tokens were, as llama.cpp's clients ask for it and read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from server.http.body import Body
from server.tokenizer_protocol import TokenizerLike
from specdec.engine.validation import MAX_LOGPROBS
from specdec.types import OutputParams, TokenLogprobs

_FLOOR = -9999.0  # stands for minus infinity, which JSON can not say


def read_output(body: Body) -> OutputParams:
    """``n_probs``: so many of the likeliest tokens beside each; 0: no probabilities. They are the model's own; the
    engine tells none after sampling (``post_sampling_probs``)."""
    wanted = body.integer("n_probs", 0, MAX_LOGPROBS)
    if body.flag("post_sampling_probs") and wanted:
        body.refuse("post_sampling_probs", "is not told; leave it out, and n_probs gives the model's own probabilities")
    body.names["output.logprobs"] = body.path("n_probs")
    return OutputParams(logprobs=wanted or None)


def probabilities(rows: Sequence[TokenLogprobs], tokenizer: TokenizerLike) -> list[dict[str, Any]]:
    """What ``completion_probabilities`` holds: natural logarithms, one entry per token."""

    def named(token: int, logprob: float) -> dict[str, Any]:
        data = tokenizer.token_bytes(token)
        text = data.decode("utf-8", "replace")
        return {"id": token, "token": text, "bytes": list(data), "logprob": max(logprob, _FLOOR)}

    return [
        named(row.token_id, row.logprob) | {"top_logprobs": [named(token, logprob) for token, logprob in row.top]}
        for row in rows
    ]
