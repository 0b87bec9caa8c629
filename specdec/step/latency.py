"""How far a sequence lags behind the time it asked for."""

from __future__ import annotations

import time

from specdec.sequence import Sequence


def tokens_due(sequence: Sequence, room: int, step_ms: float) -> float:
    """Tokens the coming step should yield so that ``sequence`` keeps its target time per token, or ends before its
    deadline; 0 where it has no such objective. ``room``: tokens it may still emit; ``step_ms``: what a step takes.
    """
    target = sequence.request.target_tpot_ms
    if target is None and sequence.deadline is None:
        return 0.0
    due, now = 0.0, time.monotonic()
    if target is not None and sequence.first_token_s is not None:
        elapsed_ms = (now - sequence.first_token_s) * 1e3
        due = (elapsed_ms + step_ms) / target - (sequence.n_output - 1)
    if sequence.deadline is not None and sequence.request.stopping.max_tokens is not None:
        left_ms = max((sequence.deadline - now) * 1e3, step_ms)
        due = max(due, room * step_ms / left_ms)
    return max(0.0, due)
