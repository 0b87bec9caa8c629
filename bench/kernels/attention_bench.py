"""Tree attention: time and share of the memory's bandwidth, by shape."""

from __future__ import annotations

from typing import Any

import torch

from bench.kernels.attention_case import AttentionCase
from bench.kernels.attention_work import AttentionWork
from bench.kernels.kernel_timer import KernelTimer


def attention_figures(case: AttentionCase, timer: KernelTimer, device: torch.device, peak: float) -> dict[str, Any]:
    """Microseconds of one layer and of the step's plan, bytes that must move, and their share of ``peak`` bytes/s."""
    work = AttentionWork.of(case, device)
    work.plan()
    took = timer.microseconds(work.attend)
    return {
        "name": case.name,
        "us": took,
        "plan_us": timer.microseconds(work.plan),
        "least_bytes": case.least_bytes,
        "bandwidth_share": case.least_bytes / (took * 1e-6) / peak,
    }
