"""What a device offers the sampler."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.row_sampling import RowSampling

NO_TOKEN = -1
MAX_LOGPROBS = 20
MAX_WIDTH = 64


class SamplingKernels(Protocol):
    """Row by row, each row's result a function of that row alone: bitwise the same in any batch, for any threads.

    ``logits`` is float32 [rows, vocab], unit stride in a row. A logit is *live* when > -1e30; others, NaN among them,
    are as good as masked, and live ones above 1e30 count as 1e30. A row without a live logit yields NO_TOKEN.
    """

    name: str

    def greedy(self, logits: Tensor, threads: int) -> NDArray[np.int32]:
        """The lowest id of the largest logit per row, nothing else applied; int32 [rows]."""

    def sample(self, logits: Tensor, rows: Sequence[RowSampling], threads: int) -> NDArray[np.int32]:
        """The token each row takes (DESIGN section 4); int32 [rows]."""

    def children(
        self, logits: Tensor, rows: Sequence[RowSampling], width: int, threads: int
    ) -> tuple[NDArray[np.int32], NDArray[np.float64]]:
        """The best ``width`` tokens per row by z + noise under the row's filters (by logit when greedy), best first.

        Returns ids int32 [rows, width], padded with NO_TOKEN, and their log-probabilities float64 [rows, width] in
        the processed and filtered distribution (greedy: softmax of the processed logits).
        """

    def logprobs(
        self, logits: Tensor, tokens: NDArray[np.int32], top: int, threads: int
    ) -> tuple[NDArray[np.float64], NDArray[np.int32], NDArray[np.float64]]:
        """log softmax of the logits as they are: of ``tokens`` int32 [rows], and the best ``top`` <= 20 per row.

        Returns chosen float64 [rows], ids int32 [rows, top] padded with NO_TOKEN, values float64 [rows, top], by
        falling probability, lower id first among equals.
        """
