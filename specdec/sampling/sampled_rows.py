"""What the sampler returns."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledRows:
    """One token per row, NO_TOKEN (-1) where a row had no usable logit (a broken model: fail that request).

    ``logprobs[r]`` is None where none were asked for, or where there is no token.
    """

    tokens: list[int]
    logprobs: list[TokenLogprobs | None]
