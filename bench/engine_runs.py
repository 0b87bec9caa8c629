"""What `specdec bench engine` records: the settings compared, each request's and workload's figures."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.core.types import DrafterStats, FinishReason, SpeculationMode, SpeculationParams, SpeculationStats, Usage
from specdec.load.figures import rounded


@dataclass(frozen=True, slots=True)
class Setting:
    """A named setting of speculation."""

    name: str
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    @staticmethod
    def fixed(depth: int, width: int, nodes: int) -> Setting:
        """Mode ON: always a tree of up to ``nodes`` draft nodes, ``depth`` deep, ``width`` children per node."""
        speculation = SpeculationParams(SpeculationMode.ON, max_nodes=nodes, max_depth=depth, width=width)
        return Setting(f"{depth}x{width}" + (f"/{nodes}" if nodes != depth else ""), speculation)


OFF = Setting("off", SpeculationParams(SpeculationMode.OFF))
AUTO = Setting("auto", SpeculationParams(SpeculationMode.AUTO))
FIXED_GRID = (
    *(Setting.fixed(depth, 1, depth) for depth in (2, 4, 6, 8, 16)),
    Setting.fixed(4, 2, 7),
    Setting.fixed(6, 3, 15),
)


MIN_TIMED_TOKENS = 4  # fewer are one step or two: their ratio says nothing


@dataclass(slots=True)
class RequestRun:
    """``first_s``: seconds spent in `Engine.step` up to the first token; ``decode_s``: after that, to the last one.
    ``first_tokens``: how many came with that step, as its tree may have been accepted already."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    text: str = ""
    first_s: float = 0.0
    decode_s: float = 0.0
    first_tokens: int = 0
    reason: FinishReason = FinishReason.ABORTED
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    usage: Usage = field(default_factory=Usage)

    @property
    def gaps(self) -> int:
        """Tokens after the first: what ``decode_s`` was spent on."""
        return max(0, len(self.tokens) - 1)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None when there are too few tokens, or all came in the first
        step, which prefills too."""
        if len(self.tokens) < MIN_TIMED_TOKENS or self.decode_s <= 0:
            return None
        return self.decode_s / self.gaps * 1e3

    def as_dict(self) -> dict[str, Any]:
        """JSON-able figures."""
        return {
            "tokens": len(self.tokens),
            "first_tokens": self.first_tokens,
            "prompt_tokens": self.usage.prompt_tokens,
            "cached_tokens": self.usage.cached_tokens,
            "first_ms": round(self.first_s * 1e3, 3),
            "decode_ms": round(self.decode_s * 1e3, 3),
            "ms_per_token": None if self.tpot_ms is None else round(self.tpot_ms, 3),
            "steps": self.stats.num_steps,
            "spec_steps": self.stats.num_spec_steps,
            "draft_tokens": self.stats.num_draft_tokens,
            "accepted_draft_tokens": self.stats.num_accepted_draft_tokens,
            "by_drafter": {
                name: [part.num_draft_tokens, part.num_accepted_draft_tokens]
                for name, part in sorted(self.stats.by_drafter.items())
            },
            "reason": str(self.reason),
        }


@dataclass(frozen=True, slots=True)
class GroupRun:
    """``total_s``: seconds spent in `Engine.step` from the first to the last, remains of prefill included. ``full_s``:
    those of them in which as many requests were in run as ever may be; ``full_tokens`` came out in these. The end,
    in which one place after the other stays empty, says how long the slowest request runs on alone."""

    requests: tuple[RequestRun, ...]
    total_s: float
    full_s: float
    full_tokens: int

    @property
    def n_tokens(self) -> int:
        """Output tokens of all requests."""
        return sum(len(request.tokens) for request in self.requests)

    @property
    def tokens_per_s(self) -> float:
        """Output tokens of all requests per second, while all places are taken."""
        return self.full_tokens / self.full_s if self.full_s > 0 else 0.0


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


def per_second(ms_per_token: float | None) -> float | None:
    """Tokens per second at so many milliseconds per token."""
    return 1e3 / ms_per_token if ms_per_token else None
