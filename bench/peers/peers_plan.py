"""What `specdec bench peers` is to do."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class PeersPlan:
    """``target``, ``draft``: as everywhere. ``engines``: of `ENGINES`. ``keep``: all stay in memory, see `Stage`.
    ``natural_ends``: answers end where the model or the workload ends them, else only fill-in-the-middle does and the
    others have ``max_tokens``. ``answer_s``: longest a single answer may take."""

    target: str
    draft: str | None
    cache_dir: Path
    threads: int
    workloads: tuple[str, ...]
    engines: tuple[str, ...]
    prompts: int = 4
    max_tokens: int = 64
    natural_ends: bool = False
    keep: bool = True
    answer_s: float = 180.0

    @property
    def folder(self) -> Path:
        """Where peers are installed and their models lie."""
        return self.cache_dir / "peers"
