"""One sequence's way down its tree."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import TokenLogprobs


@dataclass(slots=True)
class Walk:
    """The nodes accepted, and the tokens emitted (one more than nodes).

    ``broken``: a row held no usable logit, so the way ends there and the request can not go on.
    """

    nodes: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    broken: bool = False
