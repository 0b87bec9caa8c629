"""A step's results, which the device may still be working on."""

from __future__ import annotations

from typing import Any

import torch
from numpy.typing import NDArray

from specdec.models.device.host_mirror import HostMirror


class PendingResult:
    """Made when all of a step is queued; the host may do other things before it reads."""

    def __init__(self, mirror: HostMirror, device: torch.device) -> None:
        self._mirror = mirror
        self._done = torch.cuda.Event() if device.type == "cuda" else None
        if self._done is not None:
            self._done.record()

    def read(self) -> list[NDArray[Any]]:
        """Wait for the device, then what the mirror holds; to be used before the next step is queued."""
        if self._done is not None:
            self._done.synchronize()
        return self._mirror.arrays
