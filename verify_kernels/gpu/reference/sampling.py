"""Twin of `verify_kernels.gpu.sampling`: reads the table back and samples with the numpy oracle, row by row."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from verify_kernels.gpu.reference.sampling_rows import TableRow, read_rows
from verify_kernels.gpu.sampling_needs import SamplingNeeds
from verify_kernels.gpu.sampling_table import SamplingTable
from verify_kernels.gpu.sampling_workspace import SamplingWorkspace
from verify_kernels.noise import gumbel
from verify_kernels.reference_sampling import ReferenceSampling, Row, live, log_softmax, min_p, ranked, top_k, top_p
from verify_kernels.sampling_kernels import NO_TOKEN


def greedy(logits: Tensor, workspace: SamplingWorkspace, tokens: Tensor) -> None:
    """As `sampling.greedy`."""
    tokens.copy_(torch.from_numpy(ReferenceSampling().greedy(logits.cpu(), 1)))


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
    results = ReferenceSampling().logprobs(logits.cpu(), tokens.cpu().numpy(), ids.shape[1], 1)
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
