"""What an engine is, and how busy it is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """Facts that do not change while an engine lives.

    ``kernels`` is `native` or `reference`, ``numeric_mode`` `bitwise` or `numerical` (DESIGN section 5).
    ``max_context`` and ``kv_tokens`` are in tokens, ``max_batch`` in sequences; ``drafters`` are those loaded.
    """

    target: str
    draft: str | None
    dtype: str
    kernels: str
    numeric_mode: str
    max_context: int
    vocab_size: int
    kv_tokens: int
    max_batch: int
    drafters: tuple[str, ...]
    eos_ids: tuple[int, ...]
    threads: int
    version: str


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy an engine is now.

    Requests are counted once whatever their number of samples. ``tokens_per_second`` is a decayed average of emitted
    tokens. ``prefix_hit_tokens`` of ``prompt_tokens`` prompt tokens since the start came from the prefix cache.

    Since the start: ``steps`` were run, with ``step_rows`` rows in all; ``drafting_steps`` of them verified any draft,
    ``draft_rows`` draft tokens together. They took ``plan_ms``, ``draft_ms``, ``verify_ms`` and ``commit_ms``.
    """

    running_requests: int = 0
    waiting_requests: int = 0
    free_pages: int = 0
    total_pages: int = 0
    tokens_per_second: float = 0.0
    prefix_hit_tokens: int = 0
    prompt_tokens: int = 0
    steps: int = 0
    drafting_steps: int = 0
    step_rows: int = 0
    draft_rows: int = 0
    plan_ms: float = 0.0
    draft_ms: float = 0.0
    verify_ms: float = 0.0
    commit_ms: float = 0.0
