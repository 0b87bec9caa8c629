"""Replicas whose times can be computed by hand: a forward takes 10 ms and 0.1 ms more for each row beyond the first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from cluster.plan.arrivals import PlannedRequest
from cluster.plan.profile import DraftedStep, Overheads, Profile, ReplicaLimits

LIMITS: dict[str, Any] = {
    "max_batch": 16, "max_step_rows": 256, "prefill_chunk": 192, "max_context": 2048, "kv_tokens": 64 * 256,
    "max_queued_requests": 64, "target_tpot_ms": 80.0, "prefix_cache": True, "max_queued_tokens": 1 << 16,
}  # fmt: skip


def forward_ms(rows: int) -> float:
    """Of so many rows."""
    return 10.0 + 0.1 * (rows - 1)


def profile(drafted: Sequence[tuple[int, int]] = (), overheads: Overheads | None = None, **limits: Any) -> Profile:
    """One replica. drafted: draft nodes and tokens of every step."""
    table = {"rows": [1, 256], "contexts": [0], "ms": [[forward_ms(1), forward_ms(256)]], "measured": True}
    steps = (DraftedStep(sequences=tuple(drafted), draft_ms=2.0),) if drafted else ()
    return Profile(
        target="by-hand", limits=ReplicaLimits(**LIMITS | limits), verify=table, drafted=steps,
        overheads=overheads or Overheads(),
    )  # fmt: skip


def asked(at_s: float, prompt_tokens: int, output_tokens: int, *blocks: str, session: str = "") -> PlannedRequest:
    """A request whose prompt starts with 64 tokens for each of ``blocks``."""
    known = tuple((1000 + sum(name.encode()),) * 64 for name in blocks)
    return PlannedRequest(at_s, prompt_tokens, output_tokens, known, session)
