"""The ways to decode that a benchmark compares."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdec.types import SpeculationMode, SpeculationParams


@dataclass(frozen=True, slots=True)
class Arm:
    """A named setting of speculation."""

    name: str
    speculation: SpeculationParams = field(default_factory=SpeculationParams)

    @staticmethod
    def fixed(depth: int, width: int, nodes: int) -> Arm:
        """Mode ON: always a tree of up to ``nodes`` draft nodes, ``depth`` deep, ``width`` children per node."""
        speculation = SpeculationParams(SpeculationMode.ON, max_nodes=nodes, max_depth=depth, width=width)
        return Arm(f"{depth}x{width}" + (f"/{nodes}" if nodes != depth else ""), speculation)


OFF = Arm("off", SpeculationParams(SpeculationMode.OFF))
AUTO = Arm("auto", SpeculationParams(SpeculationMode.AUTO))
FIXED_GRID = (
    *(Arm.fixed(depth, 1, depth) for depth in (2, 4, 6, 8, 16)),
    Arm.fixed(4, 2, 7),
    Arm.fixed(6, 3, 15),
)
