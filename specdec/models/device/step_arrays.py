"""One step's arrays on the device, padded to a tier, and the host memory they are filled from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.device.step_tier import StepTier
from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.gpu.sampling_table import SamplingTable

Ints = NDArray[np.int32]
NOT_THERE = -1


@dataclass(frozen=True, slots=True)
class StepArrays:
    """All int32, in one stretch of memory, followed by the sampling table (None where nothing is sampled).

    Entries B, rows N, samples M, pages P of the tier. entry_start [B + 1]; entry_ctx, root_row (row of the entry that
    is its tree's root, -1: none), sample_start (where its tree's samples begin) [B]; entry_of, parent, depth, tokens
    [N]; logit_rows [M]; page_table [B, P]. ``host``: the same arrays, by name. Padding entries have no rows, padding
    rows no entry and no token.
    """

    tier: StepTier
    entry_start: Tensor
    entry_ctx: Tensor
    root_row: Tensor
    sample_start: Tensor
    entry_of: Tensor
    parent: Tensor
    depth: Tensor
    tokens: Tensor
    logit_rows: Tensor
    page_table: Tensor
    table: SamplingTable | None
    host: dict[str, Ints]

    @staticmethod
    def words(tier: StepTier) -> int:
        """int32 words of a tier's arrays, those of the sampling table without its pool included."""
        own = sum(_room(shape) for shape in _shapes(tier).values())
        return own + (SamplingTable.words(tier.samples) if tier.samples else 0)

    @staticmethod
    def within(tier: StepTier, device_buffer: Tensor, host_buffer: Tensor, saved: Tensor) -> StepArrays:
        """Views of both buffers, int32 of one length, from their beginning; the table's pool takes what is left."""
        views: dict[str, Tensor] = {}
        host: dict[str, Ints] = {}
        at = 0
        for name, shape in _shapes(tier).items():
            size = torch.Size(shape).numel()
            views[name] = device_buffer[at : at + size].view(shape)
            host[name] = host_buffer[at : at + size].view(shape).numpy()
            at += _room(shape)
        table = (
            SamplingTable.within(tier.samples, device_buffer[at:], host_buffer[at:], saved) if tier.samples else None
        )
        return StepArrays(tier, **views, table=table, host=host)

    @property
    def begin_of_table(self) -> int:
        """Words in front of the sampling table."""
        return sum(_room(shape) for shape in _shapes(self.tier).values())

    def fill(self, batch: ForwardBatch, logit_rows: Sequence[int], roots: Sequence[int], firsts: Sequence[int]) -> None:
        """Write a step into the host's memory: ``roots`` and ``firsts`` are root_row and sample_start per entry."""
        host, rows, entries = self.host, batch.rows, batch.entry_ctx.shape[0]
        for name, values, padding in (
            ("entry_start", batch.entry_start, rows),
            ("entry_ctx", batch.entry_ctx, 0),
            ("root_row", roots, NOT_THERE),
            ("sample_start", firsts, 0),
            ("entry_of", batch.entry_of, NOT_THERE),
            ("parent", batch.parent, NOT_THERE),
            ("depth", batch.depth, 0),
            ("tokens", batch.tokens, NOT_THERE),
            ("logit_rows", logit_rows, NOT_THERE),
        ):
            count = len(values)
            host[name][:count] = values
            host[name][count:] = padding
        pages = batch.page_table.shape[1]
        host["page_table"][:entries, :pages] = batch.page_table
        host["page_table"][:entries, pages:] = 0
        host["page_table"][entries:] = 0


def _shapes(tier: StepTier) -> dict[str, tuple[int, ...]]:
    entries, rows = (tier.entries,), (tier.rows,)
    return {
        "entry_start": (tier.entries + 1,), "entry_ctx": entries, "root_row": entries, "sample_start": entries,
        "entry_of": rows, "parent": rows, "depth": rows, "tokens": rows, "logit_rows": (tier.samples,),
        "page_table": (tier.entries, tier.pages),
    }  # fmt: skip


def _room(shape: tuple[int, ...]) -> int:
    """Words of an array: each starts at a multiple of 16 bytes."""
    return -(-torch.Size(shape).numel() // 4) * 4
