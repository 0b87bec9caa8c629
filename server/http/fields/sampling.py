"""How tokens are chosen."""

from __future__ import annotations

from typing import Any

from server.http.body import Body
from specdec.types import SamplingParams

_NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
_INT31 = (1 << 31) - 1
_INT63, _UINT64 = 1 << 63, 1 << 64


def read_sampling(body: Body, n: int) -> SamplingParams:
    """The fields named as OpenAI and vLLM name them; those left out are off. ``n`` samples."""
    numbers: dict[str, Any] = {name: value for name in _NUMBERS if (value := body.number(name)) is not None}
    return SamplingParams(
        **numbers,
        top_k=max(0, body.integer("top_k", -1, _INT31) or 0),
        logit_bias=_logit_bias(body),
        allowed_token_ids=body.integers("allowed_token_ids", 0, _INT31),
        seed=read_seed(body),
        n=n,
    )


def read_seed(body: Body) -> int | None:
    """Any whole number of 64 bits, signed or not; -1 asks for a random one, as vLLM and llama.cpp have it."""
    seed = body.integer("seed", -_INT63, _UINT64 - 1)
    return None if seed is None or seed == -1 else seed % _UINT64


def _logit_bias(body: Body) -> tuple[tuple[int, float], ...]:
    given = body.object("logit_bias")
    if given is None:
        return ()
    biases: dict[int, float] = {}
    for name in given.field_names:
        bias = given.number(name)
        if not (name.isascii() and name.isdigit() and len(name) < 10):
            body.refuse("logit_bias", f"{name[:20]!r} is no token id; keys are token ids in decimal")
        elif bias is not None:
            biases[int(name)] = bias
    return tuple(sorted(biases.items()))
