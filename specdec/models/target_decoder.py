"""What engine and drafters need of a model's forward, wherever that runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from specdec.models.model_config import ModelConfig
from specdec.models.paged_pool import PagedPool
from verify_kernels.forward_batch import ForwardBatch


class TargetDecoder(Protocol):
    """`Decoder` on a CPU, `DeviceDecoder` on a GPU. ``settling``: forwards of a shape before its time is what it will
    be from then on."""

    config: ModelConfig
    max_rows: int
    max_logit_rows: int
    max_positions: int
    settling: int

    @property
    def pool(self) -> PagedPool:
        """Where the KV lies."""

    def forward(self, batch: ForwardBatch, logit_rows: Sequence[int]) -> Tensor:
        """Compute every row, write its KV, and return logits float32 [len(logit_rows), vocab] of the rows named."""
