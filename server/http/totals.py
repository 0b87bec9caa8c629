"""What all samples of a call amount to."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import Delta, DrafterStats, Finished, RequestEvent, SpeculationStats, Started


@dataclass(slots=True)
class Totals:
    """Sums over prompts and samples; a prompt counts once whatever its number of samples. ``seed`` is that of the
    first prompt to start."""

    seed: int | None = None
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    accepted_prediction_tokens: int = 0
    rejected_prediction_tokens: int = 0
    finished: int = 0
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def add(self, event: RequestEvent) -> None:
        """Count ``event``."""
        if isinstance(event, Delta):
            self.output_tokens += len(event.token_ids)
        elif isinstance(event, Started):
            self.seed = event.seed if self.seed is None else self.seed
            self.prompt_tokens += event.prompt_tokens
            self.cached_tokens += event.cached_tokens
        elif isinstance(event, Finished):
            self.finished += 1
            self.accepted_prediction_tokens += event.usage.accepted_prediction_tokens
            self.rejected_prediction_tokens += event.usage.rejected_prediction_tokens
            _add_stats(self.stats, event.stats)


def _add_stats(total: SpeculationStats, part: SpeculationStats) -> None:
    total.num_steps += part.num_steps
    total.num_spec_steps += part.num_spec_steps
    total.num_draft_tokens += part.num_draft_tokens
    total.num_accepted_draft_tokens += part.num_accepted_draft_tokens
    histogram, more = total.acceptance_histogram, part.acceptance_histogram
    histogram += [0] * (len(more) - len(histogram))
    for accepted, steps in enumerate(more):
        histogram[accepted] += steps
    for name, drafter in part.by_drafter.items():
        mine = total.by_drafter.setdefault(name, DrafterStats())
        mine.num_draft_tokens += drafter.num_draft_tokens
        mine.num_accepted_draft_tokens += drafter.num_accepted_draft_tokens
