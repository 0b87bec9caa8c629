"""What many steps of the decision trace come to."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from specdec.types import DrafterStats, StepTrace


@dataclass(slots=True)
class _Error:
    """Mean absolute relative error of predictions; where nothing was realised, there is none."""

    total: float = 0.0
    count: int = 0

    def add(self, predicted: float, realised: float) -> None:
        if realised > 0 and math.isfinite(predicted):
            self.total += abs(predicted - realised) / realised
            self.count += 1

    @property
    def mean(self) -> float | None:
        return self.total / self.count if self.count else None


@dataclass(slots=True)
class TraceSummary:
    """Running figures; feed it every step with `add`."""

    steps: int = 0
    speculating: int = 0
    tokens: int = 0
    by_drafter: dict[str, DrafterStats] = field(default_factory=dict)
    _ms: _Error = field(default_factory=_Error)
    _tokens: _Error = field(default_factory=_Error)

    def add(self, step: StepTrace) -> None:
        """One more step."""
        self.steps += 1
        self.speculating += step.budget > 0
        self.tokens += step.realised_tokens
        self._ms.add(step.predicted_ms, step.realised_ms)
        self._tokens.add(step.predicted_tokens, step.realised_tokens)
        for part in step.drafters:
            stats = self.by_drafter.setdefault(part.name, DrafterStats())
            stats.num_draft_tokens += part.verified
            stats.num_accepted_draft_tokens += part.accepted

    @property
    def ms_error(self) -> float | None:
        """Mean of |predicted - realised| / realised milliseconds of drafting and verifying; None without a step."""
        return self._ms.mean

    @property
    def tokens_error(self) -> float | None:
        """The same of tokens, over the steps that sampled any."""
        return self._tokens.mean

    def lines(self) -> list[str]:
        """For a person."""
        share = self.speculating / self.steps if self.steps else 0.0
        return [
            f"{self.steps} steps, {self.tokens} tokens, {share:.0%} of the steps with drafts",
            f"mean error of predictions: {_percent(self.ms_error)} of ms, {_percent(self.tokens_error)} of tokens",
            *(
                f"{name}: {stats.num_accepted_draft_tokens} of {stats.num_draft_tokens} drafts accepted "
                f"({stats.draft_acceptance_rate:.0%})"
                for name, stats in sorted(self.by_drafter.items())
            ),
        ]


def _percent(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.1%}"
