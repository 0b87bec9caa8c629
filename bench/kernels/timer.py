"""Times GPU work by graph replays with cold caches, and describes the GPU."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import triton

from bench.machine import host_facts

FLUSH_BYTES = 512 << 20  # several times the last-level cache of any GPU
WARM_RUNS = 2


class KernelTimer:
    """Medians of ``repeats`` replays.

    Before each replay the timer reads more memory than the caches hold, so weights and keys come from memory, as
    between the layers of a model. It does not write: evicting dirty lines would cost time during the replay. Without
    a GPU it times the work directly.
    """

    def __init__(self, device: torch.device, repeats: int = 20) -> None:
        self.device, self.on_gpu, self._repeats = device, device.type == "cuda", repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4 if self.on_gpu else 1, device=device)
        self._sum = torch.zeros((), device=device)

    def microseconds(self, work: Callable[[], object], *, cold: bool = True) -> float:
        """Median time of ``work``, which must make the same launches on the same memory each time."""
        if not self.on_gpu:
            began = time.perf_counter()
            work()
            return (time.perf_counter() - began) * 1e6
        for _ in range(WARM_RUNS):  # compiles
            work()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
        pairs = []
        for _ in range(self._repeats):
            if cold:
                torch.sum(self._flush, dim=0, out=self._sum)
            pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            pair[0].record()
            graph.replay()
            pair[1].record()
            pairs.append(pair)
        torch.cuda.synchronize()
        return statistics.median(start.elapsed_time(end) * 1e3 for start, end in pairs)


# Bytes per second, from the manufacturers' data sheets
NOMINAL = {"H200": 4.8e12, "H100": 3.35e12, "A100": 2.039e12, "B200": 8.0e12, "MI300X": 5.3e12}
COPY_BYTES = 2 << 30


def peak_bandwidth(device: torch.device) -> tuple[float, str]:
    """Bytes per second of the GPU's memory, and the source of the figure: the data sheet, or a measured copy."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        for known, value in NOMINAL.items():
            if known in name:
                return value, "data sheet"
    return copy_bandwidth(device), "copy"


def copy_bandwidth(device: torch.device) -> float:
    """Bytes read and written per second by a plain copy."""
    size = COPY_BYTES if device.type == "cuda" else 1 << 20
    source = torch.zeros(size, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * size / KernelTimer(device).microseconds(lambda: target.copy_(source), cold=False) * 1e6


def product_rate(timer: KernelTimer) -> float:
    """Operations per second of the library in a product of two large bfloat16 matrices."""
    size = 8192 if timer.on_gpu else 64
    a, b, out = (torch.randn(size, size, device=timer.device).bfloat16() for _ in range(3))
    return 2 * size**3 / timer.microseconds(lambda: torch.mm(a, b, out=out), cold=False) * 1e6


def device_facts(device: torch.device) -> dict[str, Any]:
    """`host_facts`, versions, the GPU and its bandwidth."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, kernels interpreted"
    peak, source = peak_bandwidth(device)
    return {
        **host_facts(),
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "peak_bytes_per_s": peak,
        "peak_source": source,
        "copy_bytes_per_s": copy_bandwidth(device),
    }
