"""How each row of a batch is to be sampled, as arrays on the device that one upload fills."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verify_kernels.gpu.sampling_needs import SamplingNeeds
from verify_kernels.gpu.sampling_pool import SamplingPool
from verify_kernels.row_sampling import RowSampling

INERT = -1.0  # the temperature of a row that pads the batch
_RECORD = np.dtype(
    [
        ("seed", "<i8"),
        ("top_p", "<f8"),
        ("temperature", "<f4"),
        ("log_min_p", "<f4"),
        ("repetition", "<f4"),
        ("presence", "<f4"),
        ("frequency", "<f4"),
        ("top_k", "<i4"),
    ]
)  # fmt: skip; what SamplingPolicy.record holds
_WIDE = {
    "seed": torch.int64, "position": torch.int64, "top_p": torch.float64, "inverse": torch.float64,
    "inverse_repetition": torch.float64,
}  # fmt: skip
_NARROW = {
    "temperature": torch.float32, "log_min_p": torch.float32, "repetition": torch.float32, "presence": torch.float32,
    "frequency": torch.float32, "top_k": torch.int32, "mask_begin": torch.int32, "mask_words": torch.int32,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class SamplingTable:
    """Struct of arrays over ``rows`` rows, all views of one buffer, so that addresses never change.

    seed, position: int64 (unsigned 64 bits); top_p: float64; temperature (0 greedy, below 0: an inert row that yields
    no token), log_min_p, repetition, presence, frequency: float32; inverse (1 / temperature, 1 when greedy),
    inverse_repetition: float64, of the float32 values; top_k: int32; each [rows]. mask_begin, mask_words: int32
    [rows], where in ``pool`` the row's allowed tokens stand, -1: all are allowed. edits: int32 [rows, 12], the
    row's lists in ``pool``, and where in ``saved``, float32, the logits that they change are kept meanwhile. pool:
    int32 [words]. `SamplingPool` says how both are laid out.

    ``position`` may be overwritten on the device before the kernels run.
    """

    rows: int
    seed: Tensor
    position: Tensor
    top_p: Tensor
    inverse: Tensor
    inverse_repetition: Tensor
    temperature: Tensor
    log_min_p: Tensor
    repetition: Tensor
    presence: Tensor
    frequency: Tensor
    top_k: Tensor
    mask_begin: Tensor
    mask_words: Tensor
    edits: Tensor
    pool: Tensor
    saved: Tensor
    device_buffer: Tensor
    host_buffer: Tensor

    @staticmethod
    def allocate(rows: int, pool_words: int, saved: int, device: torch.device) -> SamplingTable:
        """Room for ``rows`` rows whose lists and masks take ``pool_words`` and whose lists have ``saved`` entries.

        Raises:
            ValueError: rows < 1.
        """
        if rows < 1:
            raise ValueError(f"rows: {rows}; must be at least 1")
        words = _words(rows) + max(pool_words, 1)
        buffer = torch.zeros(words, dtype=torch.int32, device=device)
        host = torch.zeros(words, dtype=torch.int32, pin_memory=device.type == "cuda")
        return SamplingTable(
            rows,
            **_views(buffer, rows),
            saved=torch.zeros(max(saved, 1), dtype=torch.float32, device=device),
            device_buffer=buffer,
            host_buffer=host,
        )

    @staticmethod
    def words(rows: int) -> int:
        """int32 words of a table's columns, without the pool."""
        return _words(rows)

    @staticmethod
    def within(rows: int, device_buffer: Tensor, host_buffer: Tensor, saved: Tensor) -> SamplingTable:
        """A table in memory of others: int32, one length, from a multiple of 16 bytes on; the pool is what is left of
        it. saved: float32, on the device."""
        return SamplingTable(
            rows, **_views(device_buffer, rows), saved=saved, device_buffer=device_buffer, host_buffer=host_buffer
        )

    @staticmethod
    def of(rows: Sequence[RowSampling], device: torch.device) -> SamplingTable:
        """A table just large enough for ``rows``, and filled with them."""
        pool = SamplingPool(rows)
        table = SamplingTable.allocate(len(rows), pool.words, pool.saved, device)
        table._upload(rows, pool)
        return table

    def fill(self, rows: Sequence[RowSampling]) -> SamplingNeeds:
        """Replace the contents by ``rows``, with inert rows behind them; what they need of the kernels.

        One copy, which does not wait: the one before it must have arrived (a step's results tell).

        Raises:
            ValueError: more rows, list entries or masks than there is room for; says which.
        """
        if len(rows) > self.rows:
            raise ValueError(f"rows: {len(rows)}; the table has room for {self.rows}")
        pool = SamplingPool(rows)
        if pool.words > self.pool.shape[0]:
            raise ValueError(f"rows: lists and masks take {pool.words} words; the table has {self.pool.shape[0]}")
        if pool.saved > self.saved.shape[0]:
            raise ValueError(f"rows: lists have {pool.saved} entries; the table has room for {self.saved.shape[0]}")
        self._upload(rows, pool)
        return SamplingNeeds.of(rows)

    def _upload(self, rows: Sequence[RowSampling], pool: SamplingPool) -> None:
        used = self.write(rows, pool)
        self.device_buffer[:used].copy_(self.host_buffer[:used], non_blocking=True)

    def write(self, rows: Sequence[RowSampling], pool: SamplingPool) -> int:
        """Replace the contents of the host's buffer by ``rows``, whose pool fits, with inert rows behind them; how many
        of its words are to be sent."""
        n = len(rows)
        host = {name: view.numpy() for name, view in _views(self.host_buffer, self.rows).items()}
        records = np.frombuffer(b"".join(row.policy.record for row in rows), _RECORD)
        for name in _RECORD.names or ():
            host[name][:n] = records[name]
        host["position"][:n] = np.asarray([row.position for row in rows], np.uint64).view(np.int64)
        heat = records["temperature"].astype(np.float64)
        host["inverse"][:n] = 1 / np.where(heat > 0, heat, 1)
        host["inverse_repetition"][:n] = 1 / records["repetition"].astype(np.float64)
        host["temperature"][n:] = INERT
        host["mask_begin"][:n], host["mask_words"][:n] = pool.mask_begin, pool.mask_words
        host["edits"][:n], host["edits"][n:] = pool.edits, 0
        pool.write(host["pool"])
        return _words(self.rows) + pool.words


def _room(rows: int) -> int:
    """Words of a narrow field: all fields start at a multiple of 16 bytes."""
    return -(-rows // 4) * 4


def _words(rows: int) -> int:
    return _room(rows) * (2 * len(_WIDE) + len(_NARROW)) + rows * SamplingPool.EDIT_WORDS


def _views(buffer: Tensor, rows: int) -> dict[str, Tensor]:
    views, at = {}, 0
    for names, size in ((_WIDE, 2), (_NARROW, 1)):
        for name, dtype in names.items():
            views[name] = buffer[at : at + rows * size].view(dtype)
            at += _room(rows) * size
    pool_begin = _words(rows)
    views["edits"] = buffer[at:pool_begin].view(rows, SamplingPool.EDIT_WORDS)
    views["pool"] = buffer[pool_begin:]
    return views
