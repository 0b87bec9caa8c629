"""Parts of an engine comparison: plan and arms."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from specdec.errors import SpecdecError


@dataclass(frozen=True, slots=True)
class PeersPlan:
    target: str  # a catalogue name or a file
    draft: str | None
    cache_dir: Path
    threads: int
    workloads: tuple[str, ...]
    engines: tuple[str, ...]
    prompts: int = 4  # per workload
    max_tokens: int = 64

    @property
    def folder(self) -> Path:
        """The folder of the installed engines, their logs and converted models."""
        return self.cache_dir / "peers"


OURS = "specdec"
OURS_OFF, OURS_AUTO = "specdec off", "specdec auto"


@dataclass(frozen=True, slots=True)
class Arm:
    """One engine with one setting."""

    name: str
    engine: str  # one of `ENGINES`
    weights: str  # numeric type of the weights
    plain: str  # name of the arm of the same engine and weights that does not draft; may be this one


class PeerError(SpecdecError):
    """An engine did not start, did not answer or returned an invalid answer. The other engines are still measured."""
