"""A decoder that notes how long its last forward took."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from specdec.models.decoder import Decoder
from verify_kernels.forward_batch import ForwardBatch


class TimedDecoder:
    """Stands in for a `Decoder` in an engine; ``seconds`` is the last forward's time."""

    def __init__(self, decoder: Decoder) -> None:
        self._decoder = decoder
        self.seconds = 0.0

    def __getattr__(self, name: str) -> Any:  # sizes, pool, taps: whatever an engine asks of its decoder
        return getattr(self._decoder, name)

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """As `Decoder.forward`."""
        began = time.perf_counter()
        result = self._decoder.forward(batch, logit_rows)
        self.seconds = time.perf_counter() - began
        return result
