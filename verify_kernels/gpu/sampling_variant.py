"""The few forms that the sampling kernels are compiled in."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from verify_kernels.gpu.sampling_table import SamplingTable

SCAN_WARPS = 8
SHORTEN_WARPS = 8
CHOOSE_WARPS = 4
EDIT_WARPS = 8
EXACT = {"enable_fp_fusion": False, "num_stages": 1}  # a fused multiply-add would be another rounding


def exact_in(registers: int) -> dict[str, int]:
    """`EXACT`, in so many registers, of which ptxas, left alone, spills a few bytes so that more programs fit."""
    return EXACT if torch.version.hip else EXACT | {"maxnreg": registers}


MAXIMA_OPTIONS = exact_in(64)
ROW_OPTIONS = exact_in(128)

_NOISE = ("inverse", "seed", "position")
_FILTERS = ("top_k", "top_p", "log_min_p")
_MASKS = ("mask_begin", "mask_words", "pool")


@dataclass(frozen=True, slots=True)
class SamplingVariant:
    """noise, filters: whether a row may have them. total: log-probabilities are wanted. wide: more tokens than one."""

    name: str
    noise: bool
    filters: bool
    total: bool
    wide: bool

    @property
    def needs_peak(self) -> bool:
        """Whether the largest z must be known before the scan."""
        return self.filters or self.total

    def columns_of(self, table: SamplingTable | None, masks: bool) -> dict[str, Tensor | None]:
        """The table's columns that the kernels read in this form; None for the others, and without a table."""
        names = ("temperature", *_NOISE * self.noise, *_FILTERS * self.filters, *_MASKS * masks)
        every = ("temperature", *_NOISE, *_FILTERS, *_MASKS)
        return {name: getattr(table, name) if table is not None and name in names else None for name in every}


GREEDY = SamplingVariant("greedy", noise=False, filters=False, total=False, wide=False)
NOISY = SamplingVariant("noisy", noise=True, filters=False, total=False, wide=False)
FILTERED = SamplingVariant("filtered", noise=True, filters=True, total=False, wide=False)
CHILDREN = SamplingVariant("children", noise=True, filters=True, total=True, wide=True)
LOGPROBS = SamplingVariant("logprobs", noise=False, filters=False, total=True, wide=True)
VARIANTS = (GREEDY, NOISY, FILTERED, CHILDREN, LOGPROBS)
