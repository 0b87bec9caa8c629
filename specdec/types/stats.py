"""Figures about one request."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(slots=True)
class DrafterStats:
    """One drafter's part: nodes of its that were verified, and those accepted. A node that several drafters
    proposed counts for each."""

    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of verified; 0 when none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


@dataclass(slots=True)
class SpeculationStats:
    """What speculation did for one sequence; field names as vLLM's ``metrics.speculative_decoding``.

    ``num_steps`` counts verify steps, ``num_spec_steps`` those with at least one draft node;
    ``acceptance_histogram[k]`` counts the latter by accepted draft tokens.
    """

    num_steps: int = 0
    num_spec_steps: int = 0
    num_draft_tokens: int = 0
    num_accepted_draft_tokens: int = 0
    acceptance_histogram: list[int] = field(default_factory=list)
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per speculative step, the target's own one included; 1 when there was none."""
        return 1.0 + self.num_accepted_draft_tokens / self.num_spec_steps if self.num_spec_steps else 1.0

    @property
    def draft_acceptance_rate(self) -> float:
        """Accepted of verified draft nodes; 0 when none was verified."""
        return self.num_accepted_draft_tokens / self.num_draft_tokens if self.num_draft_tokens else 0.0


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
    """Token counts of one sequence. ``cached_tokens``: prompt tokens whose KV came from the prefix cache.

    ``accepted_prediction_tokens``: tokens of the request's prediction that were drafted and came out;
    ``rejected_prediction_tokens``: the others of it. Both 0 without a prediction.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    preemptions: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
