"""One step's arrays on a GPU: padded to a tier of sizes, filled on the host, sent in two copies, read back in one."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.forward_batch import ForwardBatch
from verify_kernels.gpu.kernel_launch import StepRows
from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPool, SamplingTable
from verify_kernels.sampling import RowSampling


class StepTier(NamedTuple):
    """The padded sizes of a step. Launches, and so graphs, are a function of these, which are looked up often."""

    entries: int  # sequences
    rows: int  # of the forward
    samples: int  # rows whose logits are computed; 0: none
    pages: int  # page ids per sequence


# Sizes of rows and samples. Below 16 only attention's and the samplers' grids grow; above, matrix products have tiles.
_ROWS = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096)
# Sizes of page ids. They change no grid, only the upload: 2 KiB per sequence for up to 32k tokens. A further size would
# double the number of graphs.
_PAGES = (512,)


class StepTiers:
    """All tiers up to ``max_entries`` sequences, ``max_rows`` rows, ``max_samples`` logit rows and ``max_pages`` pages.

    These sizes are tiers themselves.
    """

    def __init__(self, max_entries: int, max_rows: int, max_samples: int, max_pages: int) -> None:
        doubling = tuple(1 << i for i in range(max_entries.bit_length()))
        self._entries = _ladder(doubling, max_entries)
        self.rows = _ladder(_ROWS, max_rows)
        self._samples = (0, *_ladder(_ROWS, max_samples))
        self._pages = _ladder(_PAGES, max_pages)
        self.largest = StepTier(max_entries, max_rows, max_samples, max_pages)  # of all tiers

    def of(self, entries: int, rows: int, samples: int, pages: int) -> StepTier:
        """The smallest tier that holds a step.

        Raises:
            ValueError: the step exceeds the largest tier; names the size.
        """
        return StepTier(
            _least("entries", self._entries, entries),
            _least("rows", self.rows, rows),
            _least("logit_rows", self._samples, samples),
            _least("pages", self._pages, pages),
        )


def _ladder(steps: tuple[int, ...], most: int) -> tuple[int, ...]:
    return (*(step for step in steps if step < most), most)


def _least(name: str, ladder: tuple[int, ...], wanted: int) -> int:
    if wanted > ladder[-1]:
        raise ValueError(f"{name}: {wanted}, the buffers hold {ladder[-1]}")
    return ladder[bisect_left(ladder, wanted)]


Ints = NDArray[np.int32]
NOT_THERE = -1  # padding of indices


@dataclass(frozen=True, slots=True)
class StepArrays(StepRows):
    """A step on the device: int32 arrays in one stretch of memory.

    Padding entries have no rows, padding rows no entry; a padding token or logit row is the first there is.
    """

    root_row: Tensor  # [entries] row of the entry that is its tree's root; -1: none
    sample_start: Tensor  # [entries] index of the first sample of its tree
    tokens: Tensor  # [rows]
    logit_rows: Tensor  # [samples] rows whose logits are computed
    tier: StepTier
    host: dict[str, Ints]  # the same arrays in the host's memory, by name
    words: int  # of these arrays

    @staticmethod
    def words_of(tier: StepTier) -> int:
        """int32 words of a tier's arrays."""
        return sum(_room(shape) for shape in _shapes(tier).values())

    @staticmethod
    def within(tier: StepTier, device_buffer: Tensor, host_buffer: Tensor) -> StepArrays:
        """Views of both buffers, int32 of one length, from their start."""
        views: dict[str, Tensor] = {}
        host: dict[str, Ints] = {}
        at = 0
        for name, shape in _shapes(tier).items():
            size = torch.Size(shape).numel()
            views[name] = device_buffer[at : at + size].view(shape)
            host[name] = host_buffer[at : at + size].view(shape).numpy()
            at += _room(shape)
        return StepArrays(**views, tier=tier, host=host, words=at)

    def fill(self, batch: ForwardBatch, logit_rows: Sequence[int], roots: Sequence[int], firsts: Sequence[int]) -> None:
        """Write a step to the host's arrays. ``roots`` and ``firsts`` are root_row and sample_start per entry."""
        host, rows, entries = self.host, batch.rows, batch.entry_ctx.shape[0]
        for name, values, padding in (
            ("entry_start", batch.entry_start, rows),
            ("entry_ctx", batch.entry_ctx, 0),
            ("root_row", roots, NOT_THERE),
            ("sample_start", firsts, 0),
            ("entry_of", batch.entry_of, NOT_THERE),
            ("parent", batch.parent, NOT_THERE),
            ("depth", batch.depth, 0),
            ("tokens", batch.tokens, 0),
            ("logit_rows", logit_rows, 0),
        ):
            array, count = host[name], len(values)
            array[:count] = values
            array[count:] = padding
        table, pages = host["page_table"], batch.page_table.shape[1]
        table[:entries, :pages] = batch.page_table
        table[:entries, pages:] = 0
        table[entries:] = 0


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


# Larger than most steps need: a table that grows moves, and every captured graph is then lost. Room for masks of 256
# rows over 250,000 tokens, and for penalties of as many rows over 4,000 tokens each.
POOL_WORDS = 1 << 21  # initial int32 words for a step's lists and masks
SAVED = 1 << 20  # initial number of logits that lists change


class Upload:
    """A buffer of int32 words in pinned host memory, and its copy on the device."""

    def __init__(self, words: int, device: torch.device) -> None:
        cuda = device.type == "cuda"
        self.device: Tensor = torch.zeros(words, dtype=torch.int32, device=device)
        self.host: Tensor = torch.zeros(words, dtype=torch.int32, pin_memory=cuda)
        self._sent = torch.cuda.Event() if cuda else None

    def wait(self) -> None:
        """Wait for the last copy, so that the host's words may change."""
        if self._sent is not None:
            self._sent.synchronize()

    def send(self, words: int) -> None:
        """Queue a copy of the first ``words``."""
        self.device[:words].copy_(self.host[:words], non_blocking=True)
        if self._sent is not None:
            self._sent.record()


class StepBuffer:
    """Holds one step at a time: its arrays and its sampling table, sent one after the other. Graphs need that both keep
    their addresses.

    When lists or masks outgrow their memory, all tables move; ``on_move`` is called first.
    """

    def __init__(self, tiers: StepTiers, device: torch.device, on_move: Callable[[], None]) -> None:
        self.tiers = tiers
        self._device, self._on_move = device, on_move
        self._arrays: dict[StepTier, StepArrays] = {}
        self._tables: dict[int, SamplingTable] = {}  # by rows
        self._step_upload = Upload(StepArrays.words_of(tiers.largest), device)
        self._allocate_tables(POOL_WORDS, SAVED)

    def load(
        self, batch: ForwardBatch, logit_rows: Sequence[int], roots: Sequence[int] = (), firsts: Sequence[int] = ()
    ) -> StepArrays:
        """Copy a step to the device; return its arrays. roots, firsts: root_row and sample_start per entry.

        Waits for the former copy, which is done once that step's results were read.

        Raises:
            ValueError: the step exceeds the largest tier.
        """
        entries, pages = batch.page_table.shape
        tier = self.tiers.of(entries, batch.rows, len(logit_rows), pages)
        arrays = self._arrays.get(tier)
        if arrays is None:
            arrays = self._arrays[tier] = StepArrays.within(tier, self._step_upload.device, self._step_upload.host)
        self._step_upload.wait()
        arrays.fill(batch, logit_rows, roots, firsts)
        self._step_upload.send(arrays.words)
        return arrays

    def load_table(self, samples: int, samplings: Sequence[RowSampling]) -> tuple[SamplingTable, SamplingNeeds]:
        """Copy how each logit row is sampled; return the table and the samplers' kernels that the rows need.

        samples: rows of the table, the tier's. Waits as `load` does.
        """
        pool = SamplingPool(samplings)
        if pool.words > self._pool_words or pool.saved > self._saved.shape[0]:
            self._on_move()
            self._allocate_tables(2 * max(pool.words, self._pool_words), 2 * max(pool.saved, self._saved.shape[0]))
        upload, table = self._table_upload, self._tables.get(samples)
        if table is None:
            table = self._tables[samples] = SamplingTable.within(samples, upload.device, upload.host, self._saved)
        upload.wait()
        upload.send(table.write(samplings, pool))
        return table, SamplingNeeds.of(samplings)

    def _allocate_tables(self, pool_words: int, saved: int) -> None:
        self._pool_words = pool_words
        self._table_upload = Upload(SamplingTable.words(self.tiers.largest.samples) + pool_words, self._device)
        self._saved: Tensor = torch.zeros(saved, dtype=torch.float32, device=self._device)
        self._tables.clear()


class HostMirror:
    """Host copies of device tensors, valid once the step that copied them is done. The host may do other work before it
    waits for that."""

    def __init__(self, tensors: Sequence[Tensor]) -> None:
        self._there = list(tensors)
        self._here = [torch.empty(t.shape, dtype=t.dtype, pin_memory=t.is_cuda) for t in tensors]
        self._done = torch.cuda.Event() if tensors[0].is_cuda else None
        self.arrays: list[NDArray[Any]] = [tensor.numpy() for tensor in self._here]
        """The last copies, in the tensors' order; overwritten by the next copy."""

    def copy(self) -> None:
        """Queue the copies. May be part of a graph."""
        for here, there in zip(self._here, self._there, strict=True):
            here.copy_(there, non_blocking=True)

    def end_step(self) -> None:
        """Note that the step's work is queued."""
        if self._done is not None:
            self._done.record()

    def wait(self) -> None:
        """Wait for the last step that has ended. Read the copies before the next one is queued."""
        if self._done is not None:
            self._done.synchronize()
