"""Tree attention beside what others offer for the same trees: torch's FlexAttention, FlashInfer's custom masks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from bench.kernels.attention_case import AttentionCase
from bench.kernels.attention_work import AttentionWork
from bench.kernels.flashinfer_rival import flashinfer_rival
from bench.kernels.flex_rival import flex_rival
from bench.kernels.kernel_timer import KernelTimer

Rival = Callable[[AttentionWork], Callable[[], torch.Tensor]]
RIVALS: dict[str, Rival] = {"flex": flex_rival, "flashinfer": flashinfer_rival}
MOST_ERROR = 2e-2  # of the norm: what 16-bit results of the same attention may differ by


def rival_figures(case: AttentionCase, timer: KernelTimer, device: torch.device) -> dict[str, Any]:
    """Microseconds of our layer and of each rival's, how many times ours they take, and by what share of the norm their
    results differ. A rival that can not be had, fails or computes something else is told as ``NAME_skipped``."""
    work = AttentionWork.of(case, device)
    work.plan()
    ours = timer.microseconds(work.attend)
    found: dict[str, Any] = {"name": case.name, "us": ours}
    for name, rival in RIVALS.items():
        try:
            run = rival(work)
            theirs = run().reshape(work.out.shape).float()
            error = float(torch.linalg.norm(theirs - work.out.float()) / torch.linalg.norm(work.out.float()))
            if not error <= MOST_ERROR:
                raise ValueError(f"its results differ by {error:.3f}")
            took = timer.microseconds(run)
        except Exception as why:  # whatever is wrong with it, ours are to be measured
            found[f"{name}_skipped"] = f"{type(why).__name__}: {why}".splitlines()[0][:200]
        else:
            found |= {f"{name}_us": took, f"{name}_over_ours": took / ours, f"{name}_difference": error}
    return found
