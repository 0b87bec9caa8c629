"""Memory and utilisation of the machine's GPUs, from NVIDIA's management library."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuUse:
    index: int
    uuid: str
    name: str
    memory_used: int  # bytes, of all processes
    memory_total: int  # bytes
    busy: float | None  # share of the last sample period with a kernel running, 0 to 1; None: not reported (MIG)


def _pynvml() -> Any:
    return importlib.import_module("pynvml")


class Gpus:
    """All GPUs of the driver, whichever process uses them. ``load`` imports the library, package `nvidia-ml-py`."""

    def __init__(self, load: Callable[[], Any] = _pynvml) -> None:
        self._load = load
        self._library: Any = None
        self._absent = False
        self._failed = False

    def read(self) -> list[GpuUse]:
        """The current use of each GPU; empty without library or driver, or while the driver fails. May block on the
        driver."""
        if self._library is None and not self._absent:
            self._begin()
        return [] if self._absent else list(self._uses(self._library, self._count()))

    def _begin(self) -> None:
        try:
            library = self._load()
        except ImportError:
            _LOG.info("GPU metrics are off; pip install '.[gpu]' in specdec's checkout enables them")
            self._absent = True
            return
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            _LOG.info("GPU metrics are off: %s", error)
            self._absent = True
            return
        self._library = library

    def _count(self) -> int:
        """The number of GPUs; 0 while the driver fails, as after its update under a running server."""
        try:
            count: int = self._library.nvmlDeviceGetCount()
        except self._library.NVMLError as error:
            if not self._failed:
                _LOG.warning("the GPU driver fails, so GPU metrics are missing: %s", error)
            self._failed = True
            return 0
        self._failed = False
        return count

    @staticmethod
    def _uses(library: Any, count: int) -> Iterator[GpuUse]:
        for index in range(count):
            try:
                device = library.nvmlDeviceGetHandleByIndex(index)
                uuid, name = library.nvmlDeviceGetUUID(device), library.nvmlDeviceGetName(device)
                memory = library.nvmlDeviceGetMemoryInfo(device)
            except library.NVMLError as error:  # this GPU fell off the bus
                _LOG.warning("GPU %d reports nothing: %s", index, error)
                continue
            try:
                busy = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
            except library.NVMLError:
                busy = None
            yield GpuUse(index, uuid, name, memory.used, memory.total, busy)
