"""A verifier that completes a step asynchronously, as on a GPU, to test what the host does meanwhile."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from typing import cast

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from specdec.core.tree import TokenTree
from specdec.engine.engine import EngineParts
from specdec.engine.scheduler import PlanEntry
from specdec.engine.verify import Acceptance, Verifier
from specdec.models.decoder import Decoder


class LateVerifier:
    """The CPU's, which does nothing before it is waited for. ``log`` gets `start` and `wait`; ``fails_at``: the number
    of the `start` that raises."""

    overlaps = True

    def __init__(self, parts: EngineParts, log: list[str], fails_at: int = -1) -> None:
        self._inner, self._log, self._left = Verifier(cast(Decoder, parts.decoder), parts.sampler), log, fails_at

    @property
    def keeps_aux_states(self) -> bool:
        """As the CPU's."""
        return self._inner.keeps_aux_states

    def features(self, index: int, prefill: int, acceptance: Acceptance, count: int) -> Tensor:
        """As the CPU's."""
        return self._inner.features(index, prefill, acceptance, count)

    def final_states(self, index: int, rows: range) -> NDArray[np.float64]:
        """As the CPU's."""
        return self._inner.final_states(index, rows)

    def start(self, entries: Seq[PlanEntry], trees: Seq[TokenTree | None]) -> Callable[[], list[Acceptance]]:
        """Only records the work."""
        self._log.append("start")
        self._left -= 1
        if self._left == -1:
            raise RuntimeError("the device is gone")

        def wait() -> list[Acceptance]:
            self._log.append("wait")
            return self._inner.start(entries, trees)()

        return wait
