"""A disk without room costs records, never requests."""

from __future__ import annotations

import errno
import os
import resource
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.local_server import LocalServer
from server.frame_files import FrameWriter
from server.observe.capture import read_entries
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from specdec.control.trace import read_trace
from tests.fuzz.fuzzed_server import CACHE
from tests.server.experiment.live.live_server import PLAN, live_server

_ROOM = 600  # bytes of a file


@pytest.mark.slow
async def test_a_server_serves_on_without_room_for_capture_and_trace(tmp_path: Path) -> None:
    trace, captured = tmp_path / "trace.jsonl", tmp_path / "captured"
    engine = EngineConfig(
        target="random:tiny", threads=1, cache_dir=CACHE, kv_tokens=1024, max_batch=4, max_context=192,
        max_step_rows=96, prefill_chunk=64, speculation=SpeculationConfig(profile_s=0, trace_file=trace),
    )  # fmt: skip
    server = ServerConfig(grpc_port=0, http_port=0, log_calls=False, capture_dir=captured)
    async with (
        LocalServer(Config(engine=engine, server=server)) as running,
        httpx.AsyncClient(base_url=f"http://127.0.0.1:{running.http_port}", timeout=60) as http,
    ):
        for process in (running.frontend, running.engine):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (_ROOM, _ROOM))
        for i in range(8):
            answer = await http.post("/v1/completions", json={"prompt": f"hello {i}", "max_tokens": 8})
            assert answer.status_code == 200
        assert (await http.get("/readyz")).status_code == 200
    assert trace.stat().st_size == _ROOM  # it ran into the limit
    assert list(read_trace(trace)[1]) == []
    assert 1 <= len(list(read_entries(captured))) < 8


async def test_an_experiment_without_room_for_records_ends_and_says_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(writer: FrameWriter, data: bytes) -> Any:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        monkeypatch.setattr(FrameWriter, "append", full)
        assert (await server.ask("first")).headers["x-specdec-arm"]
        await server.comes_to(lambda: server.serving.models.first.admission.experiments is None)
        for i in range(4):
            answer = await server.ask(f"later{i}")
            assert answer.status_code == 200
            assert "x-specdec-arm" not in answer.headers
        status = await server.experiments.get("widths")
        assert status.state == "failed"
        assert "records can not be written" in status.reason
