"""Twin of `verify_kernels.gpu.sampling`: reads the table back and samples with the numpy oracle, row by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPool, SamplingTable, SamplingWorkspace
from verify_kernels.noise import gumbel
from verify_kernels.reference.sampling import ReferenceSampling, Row, live, log_softmax, min_p, ranked, top_k, top_p
from verify_kernels.sampling import NO_TOKEN

Words = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class TableRow:
    """One row's numbers, and its lists by kind: ids, and counts or biases as int32 words. ``mask``: int32 words."""

    seed: int
    position: int
    temperature: np.float32
    top_k: int
    top_p: float
    log_min_p: float
    penalties: tuple[np.float32, np.float32, np.float32]
    lists: dict[int, tuple[Words, Words]]
    mask: Words | None

    def edited(self, raw: Row) -> Row:
        """``raw`` live logits with penalties, bias, mask and bans."""
        z = raw.copy()
        for kind in (SamplingPool.SEEN, SamplingPool.PATH):
            ids, counts = self._within(kind, z.size)
            z[ids] = self._penalised(raw[ids], counts)
        ids, biases = self._within(SamplingPool.BIAS, z.size)
        np.add.at(z, ids, biases.view(np.float32))
        if self.mask is not None:
            tokens = np.arange(z.size)
            word = np.append(self.mask, 0)[np.minimum(tokens >> 5, self.mask.size)]
            z[(word >> (tokens & 31) & 1) == 0] = -np.inf
        z[self._within(SamplingPool.BANNED, z.size)[0]] = -np.inf
        return live(z)

    def _within(self, kind: int, vocab: int) -> tuple[Words, Words]:
        ids, numbers = self.lists[kind]
        return ids[ids < vocab], numbers[ids < vocab]

    def _penalised(self, x: Row, counts: Words) -> Row:
        repetition, presence, frequency = self.penalties
        y = np.where(x > 0, x / repetition, x * repetition) - frequency * counts.astype(np.float32)
        return np.where(counts > 0, y - presence, y)


def read_rows(table: SamplingTable) -> list[TableRow]:
    """All rows of ``table``; waits for the device."""
    names = set(SamplingTable.__slots__) - {"rows", "host"}
    column = {name: getattr(table, name).cpu().numpy() for name in names}
    pool = column["pool"]
    rows = []
    for at in range(table.rows):
        edits, begin = column["edits"][at], int(column["mask_begin"][at])
        lists = {}
        for kind in (SamplingPool.SEEN, SamplingPool.PATH, SamplingPool.BIAS, SamplingPool.BANNED):
            first, n = edits[kind], edits[kind + 1]
            numbers = pool[first + n : first + 2 * n] if kind != SamplingPool.BANNED else np.zeros(n, np.int32)
            lists[kind] = (pool[first : first + n], numbers)
        rows.append(
            TableRow(
                seed=int(column["seed"][at]) % 2**64,
                position=int(column["position"][at]) % 2**64,
                temperature=column["temperature"][at],
                top_k=int(column["top_k"][at]),
                top_p=float(column["top_p"][at]),
                log_min_p=float(column["log_min_p"][at]),
                penalties=(column["repetition"][at], column["presence"][at], column["frequency"][at]),
                lists=lists,
                mask=None if begin < 0 else pool[begin : begin + int(column["mask_words"][at])],
            )
        )
    return rows


def sample(
    logits: Tensor, table: SamplingTable, needs: SamplingNeeds, workspace: SamplingWorkspace, tokens: Tensor
) -> None:
    """As `sampling.sample`."""
    for at, (row, how) in enumerate(zip(logits.cpu().numpy(), read_rows(table), strict=False)):
        best, _ = _best(row, how, 1)
        tokens[at] = best[0] if best.size else NO_TOKEN


def children(
    logits: Tensor,
    table: SamplingTable,
    needs: SamplingNeeds,
    workspace: SamplingWorkspace,
    ids: Tensor,
    values: Tensor,
) -> None:
    """As `sampling.children`."""
    ids.fill_(NO_TOKEN)
    values.fill_(-torch.inf)
    for at, (row, how) in enumerate(zip(logits.cpu().numpy(), read_rows(table), strict=False)):
        best, found = _best(row, how, ids.shape[1])
        ids[at, : best.size] = torch.from_numpy(best.astype(np.int32))
        values[at, : best.size] = torch.from_numpy(found)


def logprobs(
    logits: Tensor, tokens: Tensor, workspace: SamplingWorkspace, chosen: Tensor, ids: Tensor, values: Tensor
) -> None:
    """As `sampling.logprobs`."""
    results = ReferenceSampling().logprobs(logits.cpu(), tokens.cpu().numpy(), ids.shape[1])
    for target, result in zip((chosen, ids, values), results, strict=True):
        target.copy_(torch.from_numpy(result))


def _best(row: Row, how: TableRow, width: int) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    if how.temperature < 0:
        return np.zeros(0, np.int64), np.zeros(0)
    z = how.edited(live(row))
    kept = ranked(z)
    best = kept[:width]
    if how.temperature > 0:
        z = z / how.temperature
        kept = min_p(z, top_p(z, top_k(z, ranked(z), how.top_k), how.top_p), how.log_min_p)
        x = z[kept] + gumbel(how.seed, how.position, kept)
        best = kept[np.lexsort((kept, -x))[:width]]
    return best, log_softmax(z, kept)[best] if best.size else np.zeros(0)
