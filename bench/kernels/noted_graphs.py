"""Which steps a decoder runs, how often, and what the device alone takes for each."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import cast

from bench.kernels.kernel_timer import KernelTimer
from specdec.models.device.device_decoder import DeviceDecoder
from specdec.models.device.graph_cache import GraphCache


class NotedGraphs:
    """Stands in for a decoder's graphs: what it is given it passes on and counts by key. With a ``timer`` it then
    times each key's work once, while that step is the one loaded: a step run again writes what it wrote before."""

    def __init__(self, inner: GraphCache, timer: KernelTimer | None = None) -> None:
        self._inner, self._timer = inner, timer
        self.counts: Counter[Hashable] = Counter()
        self.microseconds: dict[Hashable, float] = {}

    def __len__(self) -> int:
        return len(self._inner)

    def run(self, key: Hashable, work: Callable[[], None]) -> None:
        """As `GraphCache.run`."""
        self._inner.run(key, work)
        self.counts[key] += 1
        if self._timer is not None and key not in self.microseconds:
            self.microseconds[key] = self._timer.microseconds(work, cold=False)

    def clear(self) -> None:
        """As `GraphCache.clear`."""
        self._inner.clear()


@contextmanager
def noted_graphs(decoder: DeviceDecoder, timer: KernelTimer | None = None) -> Iterator[NotedGraphs]:
    """Notes of what ``decoder`` runs in here."""
    inner = decoder.graphs
    notes = NotedGraphs(inner, timer)
    decoder.graphs = cast(GraphCache, notes)
    try:
        yield notes
    finally:
        decoder.graphs = inner
