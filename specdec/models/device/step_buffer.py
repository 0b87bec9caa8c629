"""What a step is made of, in pinned host memory and on the device: one copy takes it there."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from specdec.models.device.step_arrays import StepArrays
from specdec.models.device.step_tier import StepTier
from specdec.models.device.step_tiers import StepTiers
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.gpu.sampling_needs import SamplingNeeds
from verify_kernels.gpu.sampling_pool import SamplingPool
from verify_kernels.row_sampling import RowSampling

POOL_WORDS = 1 << 16  # lists and masks of a step, at first
SAVED = 1 << 13  # logits that lists change, at first


class StepBuffer:
    """Holds one step at a time. A tier's arrays always lie at the same addresses, until lists or masks outgrow their
    room: then all move, and ``on_move`` is called first."""

    def __init__(self, tiers: StepTiers, device: torch.device, on_move: Callable[[], None]) -> None:
        self.tiers = tiers
        self._device, self._on_move = device, on_move
        self._arrays: dict[StepTier, StepArrays] = {}
        self._sent = torch.cuda.Event() if device.type == "cuda" else None
        self._allocate(POOL_WORDS, SAVED)

    def load(
        self,
        batch: ForwardBatch,
        logit_rows: Sequence[int],
        roots: Sequence[int] = (),
        firsts: Sequence[int] = (),
        samplings: Sequence[RowSampling] = (),
    ) -> tuple[StepArrays, SamplingNeeds]:
        """Send a step; its arrays, and what its rows need of the samplers.

        roots, firsts: per entry, see `StepArrays`; samplings: how each of ``logit_rows`` is sampled, empty where none
        is. Waits for the copy before this one, which a step whose results were read has long passed.

        Raises:
            ValueError: it is larger than the largest tier.
        """
        entries, pages = batch.page_table.shape
        tier = self.tiers.of(entries, batch.rows, len(logit_rows), pages)
        pool = SamplingPool(samplings)
        if pool.words > self._pool_words or pool.saved > self._saved.shape[0]:
            self._on_move()
            self._allocate(2 * max(pool.words, self._pool_words), 2 * max(pool.saved, self._saved.shape[0]))
        arrays = self._arrays.get(tier)
        if arrays is None:
            arrays = self._arrays[tier] = StepArrays.within(tier, self._there, self._here, self._saved)
        if self._sent is not None:
            self._sent.synchronize()
        arrays.fill(batch, logit_rows, roots, firsts)
        used = arrays.begin_of_table
        if samplings and arrays.table is not None:
            used += arrays.table.write(samplings, pool)
        self._there[:used].copy_(self._here[:used], non_blocking=True)
        if self._sent is not None:
            self._sent.record()
        return arrays, SamplingNeeds.of(samplings)

    def _allocate(self, pool_words: int, saved: int) -> None:
        words = StepArrays.words(self.tiers.largest) + pool_words
        self._pool_words = pool_words
        self._there: Tensor = torch.zeros(words, dtype=torch.int32, device=self._device)
        self._here: Tensor = torch.zeros(words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._saved: Tensor = torch.zeros(saved, dtype=torch.float32, device=self._device)
        self._arrays.clear()
