"""One arm of a result."""

from __future__ import annotations

from server.experiment.config.strict_model import StrictModel


class ArmResult(StrictModel):
    """Counts over the requests that were analysed; ``accepted[k]``: verify steps that accepted k draft tokens."""

    name: str
    settings: dict[str, str]
    requests: int
    failed: int
    reasons: dict[str, int]
    tokens: int
    cached_tokens: int
    accepted: tuple[int, ...]
