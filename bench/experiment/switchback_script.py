"""Which arm serves when, in a switchback."""

from __future__ import annotations

from server.experiment.assignment import digest
from server.experiment.config.experiment_config import ExperimentConfig


class SwitchbackScript:
    """Blocks of time in pairs, one of either arm, the order in each pair drawn from the salt. The first part of every
    block is washed out: requests that began in it met what the block before had left running. Offsets are seconds from
    the beginning of block 0."""

    def __init__(self, config: ExperimentConfig) -> None:
        self._block_s, self._washout_s = config.assignment.block_s, config.assignment.washout_s
        self._salt = config.assignment.salt or config.name

    def block(self, offset_s: float) -> int:
        """The block in which a request arrives."""
        return int(offset_s // self._block_s)

    def washes(self, offset_s: float) -> bool:
        """Whether a request that arrives then is not analysed."""
        return offset_s - self.block(offset_s) * self._block_s < self._washout_s

    def arm(self, block: int) -> int:
        """The arm (0 or 1) of a block."""
        return (digest(self._salt, f"blocks/{block // 2}")[0] & 1) ^ (block & 1)
