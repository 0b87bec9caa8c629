"""All that is exported, at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from server.metrics.server_metrics import ServerMetrics
from specdec.types import EngineInfo, EngineLoad


@dataclass(frozen=True, slots=True)
class Snapshot:
    """``load`` is the engine's last word, up to a second old. ``info`` None: it has not been ready yet."""

    metrics: ServerMetrics
    load: EngineLoad
    info: EngineInfo | None
    ready: bool
    restarts: int
    in_flight: int

    @property
    def kv_usage(self) -> float:
        """Part of the KV pages in use, 0 to 1."""
        total = self.load.total_pages
        return (total - self.load.free_pages) / total if total else 0.0

    @property
    def hit_rate(self) -> float:
        """Part of all prompt tokens that came from the prefix cache."""
        prompts = self.load.prompt_tokens
        return self.load.prefix_hit_tokens / prompts if prompts else 0.0
