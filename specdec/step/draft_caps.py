"""How much may be drafted for a request."""

from __future__ import annotations

from dataclasses import dataclass

from specdec.config import SpeculationConfig
from specdec.types import SpeculationMode, SpeculationParams


@dataclass(frozen=True, slots=True)
class DraftCaps:
    """Most draft nodes of a step, most levels, and most children of a node."""

    nodes: int
    depth: int
    width: int

    @staticmethod
    def of(wish: SpeculationParams, ours: SpeculationConfig) -> DraftCaps:
        """What a request wishes, and where it does not say, what the engine's configuration says."""
        forced = wish.mode is SpeculationMode.ON
        nodes, depth = (ours.fixed_nodes, ours.fixed_depth) if forced else (ours.max_nodes, ours.max_depth)
        return DraftCaps(
            nodes if wish.max_nodes is None else wish.max_nodes,
            depth if wish.max_depth is None else wish.max_depth,
            ours.width if wish.width is None else wish.width,
        )
