"""GPU metrics, with a scripted NVML library."""

from __future__ import annotations

from typing import Any

import pytest

from server.observe.gpus import Gpus, GpuUse
from server.prometheus import gpu_families
from tests.server.http.harness import running
from tests.server.observe.metrics.scrape import Scrape
from tests.server.observe.metrics.scripted_nvml import Gpu, ScriptedNvml


def test_every_gpu_is_reported_and_a_lost_one_hides_no_other() -> None:
    library = ScriptedNvml([Gpu(3, 10, 25), Gpu(0, 0, 0, lost=True), Gpu(5, 20, None)])
    gpus = Gpus(lambda: library)
    expected = [GpuUse(0, "GPU-0", "Scripted", 3, 10, 0.25), GpuUse(2, "GPU-2", "Scripted", 5, 20, None)]
    assert gpus.read() == gpus.read() == expected
    assert library.begun == 1


def test_a_driver_that_fails_costs_the_gpus_alone_and_one_log_line(caplog: pytest.LogCaptureFixture) -> None:
    library = ScriptedNvml([Gpu(3, 10, 25)])
    gpus = Gpus(lambda: library)
    assert len(gpus.read()) == 1
    library.fails = True
    assert gpus.read() == gpus.read() == []
    assert caplog.text.count("version mismatch") == 1
    library.fails = False
    assert len(gpus.read()) == 1


def no_library() -> Any:
    raise ImportError("No module named 'pynvml'")


@pytest.mark.parametrize("load", [no_library, lambda: ScriptedNvml([], driver=False)])
def test_without_library_or_driver_no_gpu_is_reported(load: Any) -> None:
    gpus = Gpus(load)
    assert gpus.read() == []
    assert list(gpu_families(gpus.read())) == []


def test_a_scrape_contains_gpu_metrics() -> None:
    library = ScriptedNvml([Gpu(3 << 30, 10 << 30, 25), Gpu(5, 20, None)])
    with running() as server:
        exporter = server.serving.models.exporter
        assert exporter is not None
        exporter._gpus = Gpus(lambda: library)
        found = Scrape(server.client.get("/metrics").text)
    assert found.by_label("specdec_gpu_memory_used_bytes", "gpu") == {"0": 3 << 30, "1": 5}
    assert found.by_label("specdec_gpu_memory_bytes", "uuid") == {"GPU-0": 10 << 30, "GPU-1": 20}
    assert found.by_label("specdec_gpu_utilization_ratio", "gpu") == {"0": 0.25}
