"""Device work recorded as CUDA graphs, one per key."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable

import torch

MOST = 256  # graphs kept; each takes some megabytes of host memory


class GraphCache:
    """Runs work that is the same launches on the same memory whenever its key is the same.

    On a GPU a key's work runs as it is the first time, which also compiles what is not compiled yet, is recorded the
    second time and replayed from then on. Elsewhere it simply runs.
    """

    def __init__(self, device: torch.device) -> None:
        self._captures = device.type == "cuda"
        self._graphs: OrderedDict[Hashable, torch.cuda.CUDAGraph] = OrderedDict()
        self._seen: set[Hashable] = set()

    def __len__(self) -> int:
        return len(self._graphs)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """Queue the work of ``key``."""
        if not self._captures:
            work()
        elif key in self._graphs:
            self._graphs.move_to_end(key)
            self._graphs[key].replay()
        elif key not in self._seen:
            work()
            self._seen.add(key)
        else:
            self._record(key, work).replay()

    def clear(self) -> None:
        """Forget all: the memory that graphs work on is about to be given back."""
        self._graphs.clear()

    def _record(self, key: Hashable, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            work()
        self._graphs[key] = graph
        if len(self._graphs) > MOST:
            self._graphs.popitem(last=False)
        return graph
