"""Metrics as Prometheus scrapes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from server.engine_state import EngineState
from server.metrics.own_names import own_families
from server.metrics.server_metrics import ServerMetrics
from server.metrics.snapshot import Snapshot
from server.metrics.vllm_names import vllm_families
from specdec.errors import EngineDeadError

if TYPE_CHECKING:
    from server.engine_client import EngineClient

Compat = Literal["none", "vllm"]


class Exporter(Collector):
    """A registry of its own over a server's metrics, its engine's load, and what both processes use."""

    def __init__(self, metrics: ServerMetrics, client: EngineClient, compat: Compat = "none") -> None:
        self._metrics, self._client, self._compat = metrics, client, compat
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)
        # No process: its files are not there, and the collector says nothing.
        ProcessCollector("specdec:engine", lambda: client.pid or "none", registry=self._registry)

    def render(self, accept: str) -> tuple[bytes, bytes]:
        """The exposition in the format that ``accept``, the header of a scrape, likes best, and its media type."""
        encode, media_type = choose_encoder(accept)
        return encode(self._registry), media_type.encode()

    def collect(self) -> Iterator[Metric]:
        """All families, at one moment."""
        client = self._client
        try:
            info = client.info
        except EngineDeadError:
            info = None
        ready = client.state == EngineState.READY
        now = Snapshot(self._metrics, client.load, info, ready, client.restarts, client.in_flight)
        yield from own_families(now)
        if self._compat == "vllm":
            yield from vllm_families(now)
