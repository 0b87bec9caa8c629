"""A disk that is full or read-only costs captures and records, never requests; nothing is half written."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

import httpx
import psutil
import pytest

from bench.local_server import LocalServer
from server.errors import CAPTURE_FILE
from server.experiment import folder
from server.experiment.folder import ExperimentFolder
from server.observe.capture import Capture
from server.observe.observer import Observer
from specdec.atomic_file import replacing
from specdec.config import Config, EngineConfig, ServerConfig, SpeculationConfig
from specdec.control.trace import read_trace
from specdec.core.types import Request
from tests.fuzz.fuzzed_server import CACHE
from tests.server.experiment.live.live_server import PLAN, LiveServer, live_server
from tests.server.observe.capture.lines import captured_lines

_ROOM = 600  # bytes of a file


@pytest.mark.slow
async def test_a_server_keeps_serving_when_capture_and_trace_have_no_space(tmp_path: Path) -> None:
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
        traced = trace.stat().st_size
        for process, room in ((running.frontend, _ROOM), (running.engine, traced + 10)):
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (room, room))
        for i in range(8):
            answer = await http.post("/v1/completions", json={"prompt": f"hello {i}", "max_tokens": 8})
            assert answer.status_code == 200
        assert (await http.get("/readyz")).status_code == 200
        lost = [line for line in (await http.get("/metrics")).text.splitlines() if 'file="capture"' in line]
    assert trace.stat().st_size <= traced + 10  # no step fits
    assert list(read_trace(trace)[1]) == []
    assert lost
    assert not lost[0].endswith(" 0.0")
    assert 1 <= len(captured_lines(captured)) < 8


class Disk:
    """A file system of 1 MiB."""

    def __init__(self, path: Path) -> None:
        self.path, self._ballast = path, path / "ballast"

    def fill(self) -> None:
        """Use up all space."""
        with suppress(OSError), self._ballast.open("ab", buffering=0) as out:
            while True:
                out.write(bytes(4096))

    def free(self) -> None:
        """Make space again."""
        self._ballast.unlink()

    def remount(self, mode: str) -> None:
        """``ro`` or ``rw``."""
        subprocess.run(["mount", "-o", f"remount,{mode}", self.path], check=True)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    path = tmp_path / "disk"
    path.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "none", path], check=False, capture_output=True)
    if mounted.returncode:
        pytest.skip("needs the right to mount a file system")
    try:
        yield Disk(path)
    finally:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_captures_stop_on_a_full_disk_and_resume_with_free_space(disk: Disk, caplog: pytest.LogCaptureFixture) -> None:
    observer = Observer()
    errors = observer.metrics.file_errors
    capture = Capture(disk.path / "captured", 1 << 19, prompts=True, file_errors=errors)

    def end_one(name: str) -> None:
        record = observer.request(Request(name, tuple(range(4000))))
        record.ended(False)
        capture.request_ended(record)

    end_one("before")
    disk.fill()
    for number in range(3):  # the first may fit into the last page of the file
        end_one(f"full{number}")
    assert errors[CAPTURE_FILE] >= 2
    lost = errors[CAPTURE_FILE]
    disk.free()
    end_one("after")
    capture.close()
    assert errors[CAPTURE_FILE] == lost
    assert len(captured_lines(disk.path / "captured")) == 5 - lost
    assert caplog.text.count("are not captured") == 1


async def lost_records(server: LiveServer) -> int:
    """The metric of records that were not written."""
    lines = (await server.http.get("/metrics")).text.splitlines()
    [line] = [line for line in lines if line.startswith('specdec_file_errors_total{file="experiment"}')]
    return int(float(line.rpartition(" ")[2]))


async def test_records_are_lost_on_a_full_disk_and_written_with_free_space(tmp_path: Path, disk: Disk) -> None:
    async with live_server(tmp_path, folder=disk.path) as server:
        server.folder = disk.path
        await server.experiments.start(PLAN)
        await server.ask("before")
        await server.recorded(1)
        disk.fill()
        sent = 0
        while not await lost_records(server):  # until the last page of the file is full
            assert (await server.ask("x" * 30)).headers["x-specdec-arm"]
            sent += 1
        disk.free()
        status = await server.experiments.get("widths")
        written = sent + 1 - await lost_records(server)
        assert (status.state, sum(status.records.values())) == ("running", written)
        await server.ask("after")
        assert len(await server.recorded(written + 1)) == written + 1


def failing_at(name: str) -> Any:
    """`replacing` on a disk that is full when it comes to the file ``name``."""

    @contextmanager
    def full(path: Path) -> Iterator[BinaryIO]:
        with replacing(path) as file:
            yield file
            if path.name == name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    return full


def held() -> tuple[set[threading.Thread], set[str]]:
    """Threads of records, and open files."""
    threads = {thread for thread in threading.enumerate() if thread.name.startswith("experiment-records")}
    return threads, {file.path for file in psutil.Process().open_files() if "/disk/" in file.path}


@pytest.mark.parametrize("broken", ["full", "full-manifest", "full-state", "read-only"])
async def test_a_failed_start_leaves_nothing_open_and_can_be_repeated(
    tmp_path: Path, disk: Disk, broken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    earlier, _ = held()  # another test's server may still end
    async with live_server(tmp_path, folder=disk.path / "experiments") as server:
        (disk.path / "experiments").mkdir()
        if broken == "read-only":
            disk.remount("ro")
        elif broken == "full":
            disk.fill()
        else:
            monkeypatch.setattr(folder, "replacing", failing_at(f"{broken.removeprefix('full-')}.json"))
        for _ in range(3):
            answer = await server.http.post("/v1/experiments", content=PLAN)
            assert answer.status_code == 409, answer.text
        threads, files = held()
        assert (threads - earlier, files) == (set(), set())
        assert {status.state for status in await server.experiments.statuses()} <= {"stopped"}
        assert await lost_records(server) >= 3
        assert "x-specdec-arm" not in (await server.ask("meanwhile")).headers
        monkeypatch.undo()
        disk.remount("rw")
        if broken == "full":
            disk.free()
        assert (await server.http.post("/v1/experiments", content=PLAN)).status_code == 201
        assert "x-specdec-arm" in (await server.ask("then")).headers


@pytest.mark.parametrize("by", ["another stop", "the server's end"])
async def test_a_stop_on_a_full_disk_is_written_once_there_is_space(tmp_path: Path, disk: Disk, by: str) -> None:
    async with live_server(tmp_path, folder=disk.path) as server:
        await server.experiments.start(PLAN)
        disk.fill()
        assert (await server.experiments.stop("widths")).state == "stopped"
        assert (await server.http.post("/v1/experiments", content=PLAN)).status_code == 409
        stored = ExperimentFolder(disk.path / "widths").state()
        assert stored.state == "running"  # as it was, and whole
        disk.free()
        assert (await server.experiments.get("widths")).state == "stopped"
        if by == "another stop":
            assert (await server.experiments.stop("widths")).state == "stopped"
            assert ExperimentFolder(disk.path / "widths").state().state == "stopped"
    assert ExperimentFolder(disk.path / "widths").state().state == "stopped"
    assert [path.name for path in (disk.path / "widths").glob(".state*")] == []
