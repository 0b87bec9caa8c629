"""What a step needs of whatever runs its rows and walks its trees."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import Protocol

from torch import Tensor

from specdec.scheduler import PlanEntry
from specdec.step.sequence_state import SequenceState
from specdec.step.walk import Walk
from specdec.tree import TokenTree


class StepVerifier(Protocol):
    """`Verifier` (`specdec.step.verifier`) on a CPU, `DeviceVerifier` (`specdec.step.device_verifier`) on a GPU: the
    same tokens for the same logits."""

    @property
    def taps(self) -> bool:
        """Whether the target keeps hidden states for a feature head."""

    def features(self, index: int, chain: int, walk: Walk, count: int) -> Tensor:
        """Hidden states of the last run's entry ``index``: its ``chain`` prompt rows, the root, the accepted path; the
        first ``count`` of them, float32 [count, taps * hidden] in CPU memory."""

    @property
    def overlaps(self) -> bool:
        """Whether there is time between the return of `start` and the walks, for work that does not need them."""

    def start(
        self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None], states: Seq[SequenceState]
    ) -> Callable[[], list[Walk]]:
        """Forward all rows, walk all trees, move the accepted KV. What is returned waits until that is done and gives
        one Walk per entry; it is to be called before the next `start`."""
