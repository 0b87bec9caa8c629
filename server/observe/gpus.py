"""Memory and utilisation of the machine's GPUs, as NVIDIA's management library tells them."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GpuUse:
    """``busy``: the share of the last moment in which a kernel ran, 0 to 1; None: the GPU does not tell, as a part of
    one that is divided. Memory is in bytes, of all processes together."""

    index: int
    uuid: str
    name: str
    memory_used: int
    memory_total: int
    busy: float | None


def _pynvml() -> Any:
    return importlib.import_module("pynvml")


class Gpus:
    """Every GPU that the driver lists, whoever uses it. ``load`` imports the library, from package `nvidia-ml-py`."""

    def __init__(self, load: Callable[[], Any] = _pynvml) -> None:
        self._load = load
        self._library: Any = None
        self._absent = False

    def read(self) -> list[GpuUse]:
        """Each GPU now; none where the library or the driver is not there. May wait for the driver."""
        if self._library is None and not self._absent:
            self._begin()
        return [] if self._absent else list(self._uses(self._library))

    def _begin(self) -> None:
        try:
            library = self._load()
        except ImportError:
            _LOG.info("no metrics of GPUs: install 'specdec[gpu]' to have them")
            self._absent = True
            return
        try:
            library.nvmlInit()
        except library.NVMLError as error:
            _LOG.info("no metrics of GPUs: %s", error)
            self._absent = True
            return
        self._library = library

    @staticmethod
    def _uses(library: Any) -> Iterator[GpuUse]:
        for index in range(library.nvmlDeviceGetCount()):
            try:
                device = library.nvmlDeviceGetHandleByIndex(index)
                uuid, name = library.nvmlDeviceGetUUID(device), library.nvmlDeviceGetName(device)
                memory = library.nvmlDeviceGetMemoryInfo(device)
            except library.NVMLError as error:  # it fell off the bus: the others go on
                _LOG.warning("GPU %d tells nothing: %s", index, error)
                continue
            try:
                busy = library.nvmlDeviceGetUtilizationRates(device).gpu / 100
            except library.NVMLError:
                busy = None
            yield GpuUse(index, uuid, name, memory.used, memory.total, busy)
