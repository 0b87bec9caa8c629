"""How long device work takes: replays of a graph, with cold caches."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

FLUSH_BYTES = 512 << 20  # several times the last-level cache of any GPU
WARM_RUNS = 2


class KernelTimer:
    """Medians of ``repeats`` replays. Before each, more memory is read than caches hold, so that weights and keys come
    from memory as they do between the layers of a model. Read, not written: a cache full of what was written has to
    bring that to memory while the work is timed. Without a GPU work is run and timed as it is."""

    def __init__(self, device: torch.device, repeats: int = 20) -> None:
        self._cuda, self._repeats = device.type == "cuda", repeats
        self._flush = torch.zeros(FLUSH_BYTES // 4 if self._cuda else 1, device=device)
        self._sum = torch.zeros((), device=device)

    def microseconds(self, work: Callable[[], object], *, cold: bool = True) -> float:
        """Median time of ``work``, which must be the same launches on the same memory each time."""
        if not self._cuda:
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
