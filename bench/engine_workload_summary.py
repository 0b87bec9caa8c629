"""What speculation did for one workload."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.types import DrafterStats


@dataclass(frozen=True, slots=True)
class WorkloadSummary:
    """Ratios are time per output token without over with speculation: above 1 is faster.

    ``base_ms`` and ``arm_ms``: milliseconds per output token over the whole workload; where requests ran at once, of
    all together and while all places were taken. ``total_ratio`` is their quotient; ``whole_ratio``, only of such
    requests, that of the times from the first step to the last, in which ever fewer run. The other ratios are per
    prompt; ``timed`` of the ``prompts`` were long enough for one. ``worst`` is the lowest. None stands for a figure
    that nothing was measured for.
    """

    workload: str
    concurrent: bool
    prompts: int
    timed: int
    base_ms: float | None
    arm_ms: float | None
    ratio_p10: float | None
    ratio_median: float | None
    ratio_p90: float | None
    total_ratio: float | None
    whole_ratio: float | None
    worst: float | None
    worst_prompt: str
    tokens_per_step: float | None
    drafters: dict[str, DrafterStats] = field(default_factory=dict)

    def as_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        figures: dict[str, Any] = {
            "prompts": self.prompts,
            "timed": self.timed,
            "off_ms_per_token": rounded(self.base_ms),
            "auto_ms_per_token": rounded(self.arm_ms),
            "ratio_median": rounded(self.ratio_median),
            "ratio_p10": rounded(self.ratio_p10),
            "ratio_p90": rounded(self.ratio_p90),
            "ratio_total": rounded(self.total_ratio),
            "ratio_worst": rounded(self.worst),
            "worst_prompt": self.worst_prompt,
            "tokens_per_step": rounded(self.tokens_per_step),
            "drafters": {
                name: {
                    "verified": part.num_draft_tokens,
                    "accepted": part.num_accepted_draft_tokens,
                    "acceptance": round(part.draft_acceptance_rate, 4),
                }
                for name, part in sorted(self.drafters.items())
            },
        }
        if self.concurrent:
            figures["off_tokens_per_s"] = rounded(per_second(self.base_ms))
            figures["auto_tokens_per_s"] = rounded(per_second(self.arm_ms))
            figures["ratio_whole"] = rounded(self.whole_ratio)
        return figures


def rounded(value: float | None) -> float | None:
    """For JSON."""
    return None if value is None else round(value, 4)


def per_second(ms_per_token: float | None) -> float | None:
    """Tokens per second at so many milliseconds per token."""
    return 1e3 / ms_per_token if ms_per_token else None
