"""What the engine says about a request, in order: one Started, Deltas, one Finished per sample; or Failed."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types.finish_reason import FinishReason
from specdec.types.stats import SpeculationStats, Timings, Usage
from specdec.types.step_tree import StepTree


@dataclass(slots=True)
class TokenLogprobs:
    """Log-probabilities at one emitted position: the chosen token's and the best k, by falling probability."""

    token_id: int
    logprob: float
    top: list[tuple[int, float]] = field(default_factory=list)


@dataclass(slots=True)
class Started:
    """The request was first scheduled. ``seed`` is the one in force (drawn when the request gave none)."""

    request_id: str
    seed: int
    prompt_tokens: int
    cached_tokens: int
    queue_ms: float


@dataclass(slots=True)
class Delta:
    """New tokens of sample ``index``, at most one Delta per sample and engine step.

    ``text`` holds back incomplete UTF-8 and text that may turn out to begin a stop string, so the text of
    all Deltas joined is the final text. ``logprobs`` is aligned with ``token_ids`` when asked for, else empty.
    ``tree`` is what the step verified, when asked for.
    """

    request_id: str
    index: int
    token_ids: list[int]
    text: str
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    tree: StepTree | None = None


@dataclass(slots=True)
class Finished:
    """Sample ``index`` ended. ``matched_stop`` is the stop string or token id that ended it, if one did."""

    request_id: str
    index: int
    reason: FinishReason
    matched_stop: str | int | None
    usage: Usage
    stats: SpeculationStats
    timings: Timings


@dataclass(slots=True)
class Failed:
    """The request ended with an error; ``reason`` is a RequestError's machine-readable cause."""

    request_id: str
    reason: str
    message: str


RequestEvent = Started | Delta | Finished | Failed
