"""Shared helpers of the sampling tests: the sampler under test, comparisons with the oracle, hard rows."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.gpu.sampling_table import SamplingPlan
from verify_kernels.reference.sampling import ReferenceSampling
from verify_kernels.sampling import RowSampling, SamplingKernels, SamplingPolicy

Result = Sequence[NDArray[Any]]


class ManySplits(SamplingPlan):
    """Splits of 64 tokens: up to sixteen of them in a small vocabulary."""

    @staticmethod
    def of(vocab: int) -> SamplingPlan:
        return SamplingPlan(vocab, 16, 4, 16)


def row(seed: int = 1, position: int = 7, **policy: Any) -> RowSampling:
    return RowSampling(SamplingPolicy(seed=seed, **policy), position)


def differences(
    kernels: SamplingKernels,
    logits: Tensor,
    rows: Sequence[RowSampling],
    width: int,
    only: Sequence[str] = ("sample", "greedy", "children", "logprobs"),
) -> list[str]:
    """Where ``kernels`` and the oracle differ in any bit."""
    oracle = ReferenceSampling()
    tokens = oracle.sample(logits, rows)
    requested = {
        "sample": lambda k: (k.sample(logits, rows),),
        "greedy": lambda k: (k.sample(logits, [row(temperature=0.0)] * len(rows)),),
        "children": lambda k: k.children(logits, rows, width),
        "logprobs": lambda k: k.logprobs(logits, tokens, min(width, 20)),
    }
    found = {name: (requested[name](kernels), requested[name](oracle)) for name in only}
    return [f"{name}: {ours} is {theirs}" for name, (ours, theirs) in found.items() if not same(ours, theirs)]


def same(ours: Result, theirs: Result) -> bool:
    pairs = zip(ours, theirs, strict=True)
    return all(a.dtype == b.dtype and np.ascontiguousarray(a).tobytes() == b.tobytes() for a, b in pairs)


def hard_logits(vocab: int) -> dict[str, Tensor]:
    """Rows that break short cuts, by name; float32 [vocab]."""
    noise = torch.randn(vocab, generator=torch.Generator().manual_seed(5))
    steps = torch.arange(vocab) % 7
    one = torch.full((vocab,), -torch.inf)
    one[vocab - 2] = 3.0
    return {
        "all equal": torch.zeros(vocab),
        "both zeros": torch.where(steps < 3, 0.0, -0.0),
        "steps": steps.float(),
        "one live": one,
        "dead": torch.where(steps < 4, torch.nan, -torch.inf),
        "huge": noise * 3e29,
        "tiny": noise * 1e-40,
        "across scales": torch.sign(noise) * 10 ** (20 * noise),
        "one ahead": noise + 25 * (torch.arange(vocab) == 17),
        "first are likely": noise - torch.arange(vocab) / 50,
    }
