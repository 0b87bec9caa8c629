"""Figures about one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one sequence. ``acceptance_histogram[k]`` counts verify steps that accepted k
    draft tokens. ``by_drafter`` maps a drafter's name to (nodes proposed, nodes accepted)."""

    num_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)


@dataclass(slots=True)
class Timings:
    """Milliseconds spent by one sequence. ``queue_ms``: arrival to first scheduling; ``prefill_ms``: first
    scheduling to first token; ``decode_ms``: first token to the end; ``draft_ms`` and ``verify_ms``: its steps'
    time in propose and in verify."""

    queue_ms: float = 0.0
    prefill_ms: float = 0.0
    decode_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0


@dataclass(slots=True)
class Usage:
    """Token counts of one sequence. ``cached_tokens``: prompt tokens whose KV came from the prefix cache."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
