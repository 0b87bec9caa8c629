"""Graphs: plain runs without a GPU; with one, captured work is replayed."""

from __future__ import annotations

from unittest import mock

import pytest
import torch

from specdec.models import device_decoder
from specdec.models.device_decoder import GraphCache


def test_without_a_gpu_work_runs_directly() -> None:
    graphs, runs = GraphCache(torch.device("cpu")), []
    for _ in range(3):
        graphs.run("key", lambda: runs.append(1))
    assert len(runs) == 3
    assert not graphs._graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_work_is_captured_once_and_replayed() -> None:
    graphs, x, runs = GraphCache(torch.device("cuda")), torch.zeros(4, device="cuda"), []

    def work() -> None:
        runs.append(1)
        x.add_(1)

    for _ in range(5):
        graphs.run("key", work)
    assert len(runs) == 2  # as it is, then captured
    assert x.tolist() == [5.0] * 4
    graphs.clear()
    graphs.run("key", work)
    assert x.tolist() == [6.0] * 4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_least_recently_used_graphs_are_evicted_first() -> None:
    graphs, x = GraphCache(torch.device("cuda")), torch.zeros(1, device="cuda")
    with mock.patch.object(device_decoder, "MAX_GRAPHS", 2):
        for key in ("a", "a", "b", "b", "a", "c", "c"):
            graphs.run(key, lambda: x.add_(1))
    assert list(graphs._graphs) == ["a", "c"]


def test_work_that_cannot_be_captured_runs_eagerly(caplog: pytest.LogCaptureFixture) -> None:
    runs: list[int] = []
    refused = RuntimeError("operation not permitted when stream is capturing")
    with mock.patch.object(torch.cuda, "CUDAGraph"), mock.patch.object(torch.cuda, "graph", side_effect=refused):
        graphs = GraphCache(torch.device("cuda"))
        for number in range(4):
            graphs.run("step", lambda number=number: runs.append(number))
    assert runs == [0, 1, 2, 3]
    assert caplog.text.count("without a CUDA graph: operation not permitted") == 1
