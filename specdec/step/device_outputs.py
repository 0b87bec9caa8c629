"""Where a step on a GPU leaves what the host wants of it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from specdec.models.device.host_mirror import HostMirror
from specdec.sampling import NO_TOKEN
from verify_kernels.gpu.accept_result import AcceptResult


@dataclass(frozen=True, slots=True)
class DeviceOutputs:
    """Of one tier. tokens: int32 [samples]; chosen float64 [samples], ids int32 and values float64 [samples, top] where
    log-probabilities are wanted, else None. The host's copies are valid once the step that wrote them is done."""

    accepted: AcceptResult
    tokens: Tensor
    chosen: Tensor | None
    ids: Tensor | None
    values: Tensor | None
    mirror: HostMirror

    @staticmethod
    def allocate(entries: int, samples: int, top: int | None, max_depth: int, device: torch.device) -> DeviceOutputs:
        """``top``: how many of the best tokens per row; None: no log-probabilities."""
        accepted = AcceptResult.allocate(entries, max_depth, device)
        tokens = torch.full((samples,), NO_TOKEN, dtype=torch.int32, device=device)
        if top is None:
            return DeviceOutputs(accepted, tokens, None, None, None, HostMirror([accepted.for_host]))
        chosen = torch.zeros(samples, dtype=torch.float64, device=device)
        ids = torch.zeros(samples, top, dtype=torch.int32, device=device)
        values = torch.zeros(samples, top, dtype=torch.float64, device=device)
        return DeviceOutputs(
            accepted, tokens, chosen, ids, values, HostMirror([accepted.for_host, chosen, ids, values])
        )

    def walks(self) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
        """counts [entries]; rows of the entry and tokens emitted [entries, max_depth + 1], see `AcceptResult`."""
        flat: NDArray[Any] = self.mirror.arrays[0]
        entries, width = self.accepted.rows.shape
        rows, emitted = np.split(flat[2 * entries :].reshape(2 * entries, width), 2)
        return flat[:entries], rows, emitted

    def logprobs(self, sample: int, top: int) -> tuple[float, list[tuple[int, float]]]:
        """Of a sample's token, and the best ``top`` tokens with theirs."""
        _, chosen, ids, values = self.mirror.arrays
        pairs = zip(ids[sample, :top].tolist(), values[sample, :top].tolist(), strict=True)
        return float(chosen[sample]), [pair for pair in pairs if pair[0] != NO_TOKEN]
