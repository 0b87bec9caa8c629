"""Figures as plain dicts whose keys are the public names, for JSON."""

from __future__ import annotations

import math
from dataclasses import fields
from typing import Any

from specdec.types.stats import SpeculationStats
from specdec.types.step_trace import DrafterTrace, StepTrace


def metrics_dict(stats: SpeculationStats) -> dict[str, Any]:
    """``stats`` as vLLM answers them below ``metrics``, with ``num_steps`` and ``by_drafter`` added."""
    return {
        "speculative_decoding": {
            "mean_acceptance_length": stats.mean_acceptance_length,
            "draft_acceptance_rate": stats.draft_acceptance_rate,
            "acceptance_histogram": list(stats.acceptance_histogram),
            "num_spec_steps": stats.num_spec_steps,
            "num_draft_tokens": stats.num_draft_tokens,
            "num_accepted_draft_tokens": stats.num_accepted_draft_tokens,
            "num_steps": stats.num_steps,
            "by_drafter": {
                name: {
                    "num_draft_tokens": part.num_draft_tokens,
                    "num_accepted_draft_tokens": part.num_accepted_draft_tokens,
                    "draft_acceptance_rate": part.draft_acceptance_rate,
                }
                for name, part in stats.by_drafter.items()
            },
        }
    }


def trace_dict(step: StepTrace) -> dict[str, Any]:
    """``step`` without what replay needs; numbers that JSON can not write, infinite ones and NaN, become None."""
    scalars = {f.name: _writable(getattr(step, f.name)) for f in fields(step) if f.name not in ("drafters", "replay")}
    return {**scalars, "drafters": [_drafter_dict(part) for part in step.drafters]}


def _drafter_dict(part: DrafterTrace) -> dict[str, Any]:
    return {f.name: _writable(getattr(part, f.name)) for f in fields(part)}


def _writable(value: Any) -> Any:
    return None if isinstance(value, float) and not math.isfinite(value) else value
