"""One sample of an answer."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.types import FinishReason, SpeculationStats, Timings, TokenLogprobs, Usage


@dataclass(frozen=True, slots=True)
class GeneratedSample:
    """Sample ``index``, whole. ``matched_stop``: the stop string or token id that ended it, if one did."""

    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs]
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    stats: SpeculationStats
    timings: Timings
