"""Which parts of the sampler a batch of rows needs: what the kernels are compiled for, known on the host."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from verify_kernels.row_sampling import RowSampling


@dataclass(frozen=True, slots=True)
class SamplingNeeds:
    """What is False costs nothing. A superset of what the rows ask for gives the same tokens, so that a graph captured
    for some needs serves all batches within them.

    noise: a row has a temperature. filters: of those one has top-k, top-p or min-p. edits: a row has penalties, bias
    or bans. masks: a row has allowed tokens.
    """

    noise: bool = False
    filters: bool = False
    edits: bool = False
    masks: bool = False

    @staticmethod
    def of(rows: Iterable[RowSampling]) -> SamplingNeeds:
        """The least that serves ``rows``."""
        noise = filters = edits = masks = False
        for policy, _, changes, _, ban, mask in rows:
            if policy.temperature > 0:
                noise = True
                filters = filters or policy.top_k > 0 or policy.top_p < 1 or policy.min_p > 0
            if changes is not None:
                masks = masks or mask is not None or changes.mask is not None
                edits = edits or policy.penalises or changes.bias_ids.size > 0 or (ban and changes.banned.size > 0)
        return SamplingNeeds(noise, filters, edits, masks)

    def covers(self, other: SamplingNeeds) -> bool:
        """Whether kernels for these needs serve ``other``."""
        return all(getattr(self, name) or not getattr(other, name) for name in SamplingNeeds.__slots__)
