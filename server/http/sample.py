"""One finished sample."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import Finished, TokenLogprobs


@dataclass(slots=True)
class Sample:
    """Sample ``index`` of a call, of its prompt number ``prompt``; ``end`` is None until it finished."""

    prompt: int
    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Finished | None = None
