"""NVIDIA's management library, as far as it is used, over GPUs that a test describes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


class NVMLError(Exception):
    pass


@dataclass
class Gpu:
    """``percent`` None: utilisation is not supported. ``lost``: every query fails."""

    used: int
    total: int
    percent: int | None
    lost: bool = False
    gpu = property(lambda self: self.percent)


class ScriptedNvml:
    """In place of the module `pynvml`."""

    NVMLError = NVMLError

    def __init__(self, gpus: list[Gpu], driver: bool = True) -> None:
        self.gpus, self.driver, self.begun = gpus, driver, 0
        self.fails = False  # the driver fails after it was initialised

    def nvmlInit(self) -> None:  # noqa: N802
        self.begun += 1
        if not self.driver:
            raise NVMLError("NVML Shared Library Not Found")

    def nvmlDeviceGetCount(self) -> int:  # noqa: N802
        if self.fails:
            raise NVMLError("Driver/library version mismatch")
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Gpu:  # noqa: N802
        if self.gpus[index].lost:
            raise NVMLError("GPU is lost")
        return self.gpus[index]

    def nvmlDeviceGetUUID(self, gpu: Gpu) -> str:  # noqa: N802
        return f"GPU-{self.gpus.index(gpu)}"

    def nvmlDeviceGetName(self, gpu: Gpu) -> str:  # noqa: N802
        return "Scripted"

    def nvmlDeviceGetMemoryInfo(self, gpu: Gpu) -> Any:  # noqa: N802
        return gpu

    def nvmlDeviceGetUtilizationRates(self, gpu: Gpu) -> Any:  # noqa: N802
        if gpu.percent is None:
            raise NVMLError("Not Supported")
        return gpu
