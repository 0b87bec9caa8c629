"""The settings that `specdec bench engine` compares, and the figures of requests and groups."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from specdec.core.types import FinishReason, SpeculationMode, SpeculationParams, SpeculationStats, Usage


@dataclass(frozen=True, slots=True)
class Setting:
    """A named setting of speculation."""

    name: str
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    @staticmethod
    def fixed(depth: int, width: int, nodes: int) -> Setting:
        """Mode ON: always a tree of up to ``nodes`` nodes, ``depth`` levels and ``width`` children per node."""
        speculation = SpeculationParams(SpeculationMode.ON, max_nodes=nodes, max_depth=depth, width=width)
        return Setting(f"{depth}x{width}" + (f"/{nodes}" if nodes != depth else ""), speculation)


OFF = Setting("off", SpeculationParams(SpeculationMode.OFF))
AUTO = Setting("auto", SpeculationParams(SpeculationMode.AUTO))
FIXED_GRID = (
    *(Setting.fixed(depth, 1, depth) for depth in (2, 4, 6, 8, 16)),
    Setting.fixed(4, 2, 7),
    Setting.fixed(6, 3, 15),
)


MIN_TIMED_TOKENS = 4  # fewer come in one or two steps, too few for a ratio


@dataclass(slots=True)
class RequestRun:
    """One request in one arm. Times are seconds spent in `Engine.step`."""

    prompt: str
    tokens: list[int] = field(default_factory=list)
    first_s: float = 0.0  # to the first token
    decode_s: float = 0.0  # from the first to the last token
    first_tokens: int = 0  # tokens of the first step that returned any; more than one if it verified a tree
    reason: FinishReason = FinishReason.ABORTED
    stats: SpeculationStats = field(default_factory=SpeculationStats)
    usage: Usage = field(default_factory=Usage)

    @property
    def gaps(self) -> int:
        """Number of tokens after the first."""
        return max(0, len(self.tokens) - 1)

    @property
    def tpot_ms(self) -> float | None:
        """Milliseconds per output token after the first; None for too few tokens, or if all came in the first step,
        which includes prefill."""
        if len(self.tokens) < MIN_TIMED_TOKENS or self.decode_s <= 0:
            return None
        return self.decode_s / self.gaps * 1e3

    def as_dict(self) -> dict[str, Any]:
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
    """A group of requests in one arm.

    ``full_s`` leaves out the end of the group, when fewer and fewer requests run: its length depends on the slowest.
    """

    requests: tuple[RequestRun, ...]
    full_s: float  # seconds spent in `Engine.step` while the maximal number of requests ran
    full_tokens: int  # output tokens of that time

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second while the maximal number of requests ran."""
        return self.full_tokens / self.full_s if self.full_s > 0 else 0.0
