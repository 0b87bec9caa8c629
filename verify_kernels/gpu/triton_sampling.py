"""The GPU's sampler behind the `SamplingKernels` protocol: results come back to the host."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from verify_kernels.gpu import sampling
from verify_kernels.gpu.sampling_table import SamplingNeeds, SamplingPlan, SamplingTable, SamplingWorkspace
from verify_kernels.sampling import NO_TOKEN, Logprobs, RowSampling, Tokens


class TritonSampling:
    """Logits may lie on any device. For steps that must not wait, see `sampling`.

    plan_of: how rows of a vocabulary are cut, which changes no result.
    """

    def __init__(self, device: torch.device, plan_of: type[SamplingPlan] = SamplingPlan) -> None:
        self._device = device
        self._plan_of = plan_of
        self._workspaces: dict[int, SamplingWorkspace] = {}

    def sample(self, logits: Tensor, rows: Sequence[RowSampling]) -> Tokens:
        """One token per row."""
        if not rows:
            return np.zeros(0, np.int32)
        here, workspace = self._prepare(logits)
        tokens = self._ids(len(rows))
        table = SamplingTable.of(rows, self._device)
        sampling.sample(here, table, SamplingNeeds.of(rows), workspace, tokens)
        return _host(tokens)

    def children(self, logits: Tensor, rows: Sequence[RowSampling], width: int) -> tuple[Tokens, Logprobs]:
        """The best ``width`` <= 64 tokens per row and their log-probabilities."""
        ids, values = self._ids(len(rows), width), self._values(len(rows), width)
        if rows and width:
            here, workspace = self._prepare(logits)
            table = SamplingTable.of(rows, self._device)
            sampling.children(here, table, SamplingNeeds.of(rows), workspace, ids, values)
        return _host(ids), _host(values)

    def logprobs(self, logits: Tensor, tokens: Tokens, top: int) -> tuple[Logprobs, Tokens, Logprobs]:
        """log softmax of the unprocessed logits."""
        rows = len(tokens)
        chosen, ids, values = self._values(rows), self._ids(rows, top), self._values(rows, top)
        if rows:
            here, workspace = self._prepare(logits)
            wanted = torch.from_numpy(np.array(tokens, np.int32)).to(self._device)
            sampling.logprobs(here, wanted, workspace, chosen, ids, values)
        return _host(chosen), _host(ids), _host(values)

    def _prepare(self, logits: Tensor) -> tuple[Tensor, SamplingWorkspace]:
        here = logits.to(self._device)
        rows, vocab = here.shape
        workspace = self._workspaces.get(vocab)
        if workspace is None or workspace.rows < rows:
            room = 1 << max(rows - 1, 0).bit_length()
            workspace = SamplingWorkspace.allocate(room, self._plan_of.of(vocab), self._device)
            self._workspaces[vocab] = workspace
        return here, workspace

    def _ids(self, *shape: int) -> Tensor:
        return torch.full(shape, NO_TOKEN, dtype=torch.int32, device=self._device)

    def _values(self, *shape: int) -> Tensor:
        return torch.full(shape, -torch.inf, dtype=torch.float64, device=self._device)


def _host(tensor: Tensor) -> Any:
    return tensor.cpu().numpy()
