"""Scratch of the sampling kernels, allocated once and used by every step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.gpu.sampling_plan import SamplingPlan


@dataclass(frozen=True, slots=True)
class SamplingWorkspace:
    """For up to ``rows`` rows of ``plan.vocab`` logits.

    places, spare: int16 [rows, splits, tokens of a split], room for lists of tokens, which are short and so are what
    is written; counts: int32 [rows, splits]; weights: int64 [rows, splits]; maxima: float32 [rows, splits * groups];
    peak, bound: float32 [rows].
    """

    rows: int
    plan: SamplingPlan
    places: Tensor
    spare: Tensor
    counts: Tensor
    weights: Tensor
    maxima: Tensor
    peak: Tensor
    bound: Tensor

    @staticmethod
    def bytes_needed(rows: int, plan: SamplingPlan) -> int:
        """Of such a workspace."""
        per_split = 2 * 2 * plan.tokens + 4 + 8 + 4 * plan.groups
        return rows * (plan.splits * per_split + 8)

    @staticmethod
    def allocate(rows: int, plan: SamplingPlan, device: torch.device) -> SamplingWorkspace:
        """Four bytes per row and token, most of them never touched.

        Raises:
            ValueError: rows < 1.
        """
        if rows < 1:
            raise ValueError(f"rows: {rows}; must be at least 1")
        splits = plan.splits
        return SamplingWorkspace(
            rows,
            plan,
            places=torch.zeros((rows, splits, plan.tokens), dtype=torch.int16, device=device),
            spare=torch.zeros((rows, splits, plan.tokens), dtype=torch.int16, device=device),
            counts=torch.zeros((rows, splits), dtype=torch.int32, device=device),
            weights=torch.zeros((rows, splits), dtype=torch.int64, device=device),
            maxima=torch.zeros((rows, splits * plan.groups), dtype=torch.float32, device=device),
            peak=torch.zeros(rows, dtype=torch.float32, device=device),
            bound=torch.zeros(rows, dtype=torch.float32, device=device),
        )
