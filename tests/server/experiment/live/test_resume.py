"""Experiments outlive their server, however it ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import pytest

from server.errors import DrainingError
from server.experiment.config import parse_config
from server.experiment.folder import ExperimentFolder, Manifest, StoredState, now_text
from server.experiment.live.experiments import ExperimentNotStartedError, Experiments
from server.experiment.live.traffic import RunningExperiment
from server.experiment.records import ExperimentError, RecordLog, read_records
from server.serving import Serving
from specdec.config import ExperimentsConfig
from specdec.errors import ConfigError
from tests.fake_engine import NOTING
from tests.server.auth.key_files import make_key
from tests.server.experiment.live.live_server import PLAN, live_config, live_server
from tests.server.fake_tokenizer import FakeTokenizer

MORE = "name: more\narms: {a: {}, b: {request: {speculation: {max_depth: 5}}}}\nassignment: {mode: hash}\n"


def plan_file(tmp_path: Path, text: str = PLAN) -> Path:
    path = tmp_path / "plan.yaml"
    path.write_text(text)
    return path


@contextmanager
def server_process(config: str) -> Iterator[tuple[subprocess.Popen[str], httpx.Client]]:
    """A server in a separate process, and a client of it."""
    words = (config, NOTING, "tests.server.fake_tokenizer:FakeTokenizer")
    command = [sys.executable, "-m", "bench.local_server", *words]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert process.stdout is not None
        ports = json.loads(process.stdout.readline())
        with httpx.Client(base_url=f"http://127.0.0.1:{ports['http_port']}", timeout=20) as client:
            yield process, client
    finally:
        process.kill()
        process.wait()


def open_config(tmp_path: Path, start: list[Path]) -> str:
    """A server without keys, which begins an experiment by itself."""
    config = live_config(tmp_path, start=tuple(start))
    server = config.server.model_copy(update={"keys_file": None})
    return config.model_copy(update={"server": server}).model_dump_json()


def when(folder: Path, count: int) -> RecordLog:
    """The records, once there are ``count``."""
    end = time.monotonic() + 15
    while True:
        log = read_records(folder)
        if len(log.records) >= count:
            return log
        assert time.monotonic() < end, len(log.records)
        time.sleep(0.01)


def ask(client: httpx.Client, text: str) -> str:
    answer = client.post("/v1/completions", json={"prompt": text, "max_tokens": 3}, headers={"x-request-id": text})
    return answer.headers["x-specdec-arm"]


def test_after_a_crash_the_next_server_continues_the_experiment(tmp_path: Path) -> None:
    config = open_config(tmp_path, [plan_file(tmp_path)])
    folder = tmp_path / "experiments" / "widths"
    with server_process(config) as (process, client):
        before = {f"t{i}": ask(client, f"t{i}") for i in range(12)}
        when(folder, 12)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    (newest,) = folder.glob("records-*")
    with newest.open("ab") as torn:
        torn.write(b"\x30\x00\x00\x00half a record")  # as a death in the middle of a write leaves it
    with server_process(config) as (_, client):
        after = {f"t{i}": ask(client, f"t{i}") for i in range(12)}
        log = when(folder, 24)
    assert before == after  # nothing is remembered, nothing is forgotten
    assert len({record.request for record in log.records}) == len(log.records) == 24
    assert log.lost_bytes > 0
    arms = [record.arm for record in log.records]
    assert all(arms.count(arm) == 2 * list(before.values()).count(f"widths={arm}") for arm in ("narrow", "wide"))


async def test_a_running_experiment_continues_after_a_restart(tmp_path: Path) -> None:
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        for i in range(4):
            await server.ask(f"t{i}")
    async with live_server(tmp_path) as server:
        status = await server.experiments.get("widths")
        assert (status.state, sum(status.records.values())) == ("running", 4)
        started = status.started
        await server.ask("x")
        await server.recorded(5)
        await server.experiments.stop("widths")
    async with live_server(tmp_path) as server:
        assert (await server.experiments.get("widths")).state == "stopped"
        assert "x-specdec-arm" not in (await server.ask("y")).headers
        again = await server.experiments.start(PLAN)
        assert (again.state, sum(again.records.values()), again.started) == ("running", 5, started)


async def test_bug_only_time_in_which_it_runs_counts_towards_max_duration(tmp_path: Path) -> None:
    plan, folder = PLAN + "stopping: {max_duration: 4h}\n", ExperimentFolder(tmp_path / "experiments" / "widths")
    hour, began = 3600.0, datetime.now(UTC) - timedelta(hours=25)
    async with live_server(tmp_path) as server:
        await server.experiments.start(plan)
        await server.ask("x")
        await server.recorded(1)
        await server.experiments.stop("widths")
        state = folder.state()
        assert 0 < state.ran_s < hour
        folder.write_manifest(folder.manifest().model_copy(update={"started": began.isoformat()}))
        folder.note(state.model_copy(update={"ran_s": hour}))
        assert (await server.experiments.start(plan)).state == "running"
        await server.experiments.stop("widths")
        assert folder.state().ran_s == pytest.approx(hour, abs=hour / 2)
        folder.note(state.model_copy(update={"ran_s": 4 * hour}))
        assert (await server.experiments.start(plan)).reason == "its time has passed"
        # A server that was killed leaves the state of its start.
        folder.note(state.model_copy(update={"state": "running", "at": began.isoformat(), "ran_s": 0.0}))
        assert (await server.experiments.start(plan)).reason == "its time has passed"


async def test_a_limit_counts_across_restarts(tmp_path: Path) -> None:
    plan = PLAN + "stopping: {max_requests: 6}\n"
    for count in (4, 6):
        async with live_server(tmp_path, start=(plan_file(tmp_path, plan),)) as server:
            for i in range(4):
                await server.ask(f"t{i}")
            await server.recorded(count)
    async with live_server(tmp_path, start=(plan_file(tmp_path, plan),)) as server:
        assert len(server.records()) == 6
        assert (await server.experiments.get("widths")).state == "finished"  # and its file does not begin it again


async def test_bug_an_experiment_that_was_ending_at_shutdown_is_not_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entered = asyncio.Event()

    async def endless(_: RunningExperiment) -> str:
        entered.set()
        await asyncio.Event().wait()
        return ""

    monkeypatch.setattr(RunningExperiment, "stop", endless)
    plan = PLAN + "stopping: {max_requests: 3}\n"
    async with live_server(tmp_path) as server:
        await server.experiments.start(plan)
        for i in range(3):
            await server.ask(f"t{i}")
        await entered.wait()
    folder = ExperimentFolder(tmp_path / "experiments" / "widths")
    state = folder.state()
    assert (state.state, state.reason) == ("finished", "3 requests were recorded")
    assert folder.written() == state.records


async def test_bug_a_caller_that_leaves_does_not_interrupt_the_stop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, entered, may_end = RunningExperiment.stop, asyncio.Event(), asyncio.Event()
    troubles: list[str] = []

    async def slow(running: RunningExperiment) -> str:
        entered.set()
        await may_end.wait()
        troubles.append(await stop(running))
        return troubles[-1]

    monkeypatch.setattr(RunningExperiment, "stop", slow)
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        caller = asyncio.create_task(server.experiments.stop("widths"))
        await entered.wait()
        caller.cancel()
        await asyncio.wait([caller])
        may_end.set()
        folder = ExperimentFolder(tmp_path / "experiments" / "widths")
        await server.comes_to(lambda: folder.state().state == "stopped")
        assert (caller.cancelled(), troubles) == (True, [""])


async def test_bug_a_caller_that_leaves_does_not_interrupt_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, may_write = ExperimentFolder.note, threading.Event(), threading.Event()

    def slow(folder: ExperimentFolder, state: StoredState) -> None:
        writing.set()
        assert may_write.wait(15)
        write(folder, state)

    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.ask("x")
        await server.recorded(1)
        await server.experiments.stop("widths")
        monkeypatch.setattr(ExperimentFolder, "note", slow)
        caller = asyncio.create_task(server.experiments.start(PLAN))
        assert await asyncio.to_thread(writing.wait, 15)
        caller.cancel()
        await asyncio.wait([caller])
        may_write.set()
        folder = ExperimentFolder(tmp_path / "experiments" / "widths")
        await server.comes_to(lambda: folder.state().state == "running")
        with pytest.raises(ExperimentNotStartedError, match="is already running"):
            await server.experiments.start(PLAN)
        assert caller.cancelled()
        assert "widths=" in (await server.ask("y")).headers["x-specdec-arm"]


async def test_an_experiment_keeps_the_defaults_with_which_it_began(tmp_path: Path) -> None:
    place = tmp_path / "experiments" / "widths" / "manifest.json"
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.ask("x")
        await server.recorded(1)
    former = place.read_text().replace("queue_ms@p95", "queue_ms@p99")
    place.write_text(former)  # as a version with another default guardrail wrote it
    async with live_server(tmp_path) as server:
        assert (await server.experiments.get("widths")).state == "running"
        await server.experiments.stop("widths")
        assert (await server.experiments.start(PLAN)).state == "running"
        await server.experiments.stop("widths")
        with pytest.raises(ExperimentNotStartedError, match=r"with another plan \(plan.guardrails was"):
            await server.experiments.start(PLAN + "# the same, but not its text\n")
    assert place.read_text() == former


async def test_bug_the_name_of_an_experiment_without_records_is_free(tmp_path: Path) -> None:
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.experiments.stop("widths")
        other = PLAN.replace("width: 2", "width: 3")
        assert (await server.experiments.start(other)).state == "running"
        folder = ExperimentFolder(tmp_path / "experiments" / "widths")
        assert (folder.plan_text(), folder.manifest().config) == (other, parse_config(other, "plan"))
        await server.ask("x")
        await server.recorded(1)
        await server.experiments.stop("widths")
        with pytest.raises(ExperimentNotStartedError, match="with another plan"):
            await server.experiments.start(PLAN)


async def test_bug_a_second_stop_does_not_overwrite_the_state_of_a_new_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, may_write, fails = ExperimentFolder.note, threading.Event(), threading.Event(), [True]

    def note(folder: ExperimentFolder, state: StoredState) -> None:
        if state.state == "stopped" and fails:
            raise ExperimentError("the disk is full")
        if state.state == "stopped" and not writing.is_set():
            writing.set()
            assert may_write.wait(15)
        write(folder, state)

    monkeypatch.setattr(ExperimentFolder, "note", note)
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.experiments.stop("widths")
        fails.clear()
        stop = asyncio.create_task(server.experiments.stop("widths"))
        assert await asyncio.to_thread(writing.wait, 15)
        start = asyncio.create_task(server.experiments.start(PLAN))
        await asyncio.wait([start], timeout=0.5)  # it must wait for the write
        may_write.set()
        await asyncio.gather(stop, start)
        assert ExperimentFolder(tmp_path / "experiments" / "widths").state().state == "running"


async def test_bug_a_stop_ends_an_experiment_that_is_being_resumed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, reading, may_read = ExperimentFolder.plan_text, threading.Event(), threading.Event()

    def slow(folder: ExperimentFolder) -> str:
        reading.set()
        assert may_read.wait(15)
        return read(folder)

    folder = ExperimentFolder(tmp_path / "experiments" / "widths")
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.ask("x")
        await server.recorded(1)
        await server.experiments.stop("widths")
        folder.note(folder.state().model_copy(update={"state": "running"}))  # as a killed server leaves it
        monkeypatch.setattr(ExperimentFolder, "plan_text", slow)
        resumed = asyncio.create_task(server.experiments.start_configured())
        assert await asyncio.to_thread(reading.wait, 15)
        stopped = asyncio.create_task(server.experiments.stop("widths"))
        await asyncio.wait([stopped], timeout=0.5)
        may_read.set()
        await resumed
        assert (await stopped).state == folder.state().state == "stopped"
        assert "x-specdec-arm" not in (await server.ask("y")).headers


async def test_bug_a_second_stop_leaves_a_run_that_begins_after_the_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, writing, may_write = ExperimentFolder.begin, threading.Event(), threading.Event()

    def slow(folder: ExperimentFolder, text: str, manifest: Manifest) -> None:
        writing.set()
        assert may_write.wait(15)
        write(folder, text, manifest)

    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        monkeypatch.setattr(ExperimentFolder, "begin", slow)
        other = asyncio.create_task(server.experiments.start(MORE))
        assert await asyncio.to_thread(writing.wait, 15)
        monkeypatch.setattr(ExperimentFolder, "begin", write)
        calls = [server.experiments.stop("widths"), server.experiments.start(PLAN), server.experiments.stop("widths")]
        tasks = []
        for call in calls:
            tasks.append(asyncio.create_task(call))
            await asyncio.wait(tasks, timeout=0.2)  # each waits for the start of the other experiment
        may_write.set()
        await asyncio.gather(other, *tasks)
        assert "widths=" in (await server.ask("x")).headers["x-specdec-arm"]
        assert (await server.experiments.get("widths")).state == "running"
        assert (await server.experiments.stop("widths")).state == "stopped"
        assert "widths=" not in (await server.ask("y")).headers["x-specdec-arm"]


async def test_bug_an_experiment_that_starts_while_the_server_ends_ends_with_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, flush = ExperimentFolder.begin, RunningExperiment.flush
    may_begin, may_flush = threading.Event(), threading.Event()

    def slow_begin(folder: ExperimentFolder, text: str, manifest: Manifest) -> None:
        assert may_begin.wait(15)
        begin(folder, text, manifest)

    def slow_flush(running: RunningExperiment) -> None:
        assert may_flush.wait(15)
        flush(running)

    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        monkeypatch.setattr(ExperimentFolder, "begin", slow_begin)
        monkeypatch.setattr(RunningExperiment, "flush", slow_flush)
        under_way = asyncio.create_task(server.experiments.start(MORE))
        await asyncio.sleep(0)
        closing = asyncio.create_task(server.experiments.close())
        await asyncio.wait([closing], timeout=0.3)
        later = asyncio.create_task(server.experiments.start(PLAN))
        may_begin.set()
        assert (await under_way).state == "running"
        may_flush.set()
        await closing
        with pytest.raises(DrainingError):
            await later
        assert server.serving.models.first.admission.experiments is None
    states = [ExperimentFolder(tmp_path / "experiments" / name).state().state for name in ("widths", "more")]
    assert states == ["running", "running"]  # the next server resumes both


async def test_bug_an_experiment_that_is_not_resumed_can_be_stopped(tmp_path: Path) -> None:
    plan = PLAN.replace("speculation: {width: 2}", "speculation: {drafters: [model]}")
    folder = ExperimentFolder(tmp_path / "experiments" / "widths")
    async with live_server(tmp_path, draft="small") as server:
        assert (await server.experiments.start(plan)).state == "running"
        await server.ask("x")
        await server.recorded(1)
    async with live_server(tmp_path) as server:
        for status in (await server.experiments.get("widths"), *await server.experiments.statuses()):
            assert (status.state, sum(status.records.values())) == ("stopped", 1)
            assert status.reason.startswith("it could not be resumed: ")
            assert "drafters" in status.reason
        assert folder.state().state == "running"
    async with live_server(tmp_path, draft="small") as server:  # it runs on where it can
        assert (await server.experiments.get("widths")).state == "running"
    async with live_server(tmp_path) as server:
        status = await server.experiments.stop("widths")
        assert (status.state, status.reason) == ("stopped", "it was stopped by a call")
        state = folder.state()
        assert (state.state, sum(state.records.values()), state.ran_s > 0) == ("stopped", 1, True)
    async with live_server(tmp_path, draft="small") as server:
        assert (await server.experiments.get("widths")).state == "stopped"
        assert "x-specdec-arm" not in (await server.ask("y")).headers


async def test_bug_records_are_counted_before_the_engine_has_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.ask("x")
        await server.recorded(1)
    monkeypatch.setattr(Experiments, "start_configured", _never)
    async with live_server(tmp_path) as server:
        status = await server.experiments.get("widths")
        assert (status.state, sum(status.records.values())) == ("running", 1)


async def _never(_: Experiments) -> None:
    """Instead of what resumes experiments once the engine has loaded."""


async def test_a_limit_holds_if_the_server_ended_before_recording_it(tmp_path: Path) -> None:
    plan = PLAN + "stopping: {max_requests: 3}\n"
    start = (plan_file(tmp_path, plan),)
    async with live_server(tmp_path, start=start) as server:
        for i in range(3):
            await server.ask(f"t{i}")
        await server.recorded(3)
    ExperimentFolder(tmp_path / "experiments" / "widths").note(StoredState(state="running", at=now_text()))
    async with live_server(tmp_path, start=start) as server:
        status = await server.experiments.get("widths")
        assert (status.state, status.reason) == ("finished", "3 requests were recorded")
        assert sum(status.records.values()) == 3
        assert "x-specdec-arm" not in (await server.ask("y")).headers


def test_a_clock_that_was_set_back_gives_no_time() -> None:
    tomorrow = (datetime.now(UTC) + timedelta(days=1)).isoformat(timespec="seconds")
    assert StoredState(state="running", at=tomorrow, ran_s=60.0).spent_s == 60.0


async def test_experiment_files_start_with_the_server(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    more = tmp_path / "more.yaml"
    more.write_text("name: more\narms: {a: {}, b: {request: {speculation: {width: 5}}}}\nassignment: {mode: hash}\n")
    async with live_server(tmp_path, start=(plan_file(tmp_path), more)) as server:
        assert "widths=" in (await server.ask("x")).headers["x-specdec-arm"]
        assert [one.name for one in await server.experiments.statuses()] == ["widths"]
        assert "more and widths both change speculation.width" in caplog.text  # logged, and the server serves


async def test_bug_a_file_starts_again_after_a_start_that_was_killed(tmp_path: Path) -> None:
    start, folder = (plan_file(tmp_path),), ExperimentFolder(tmp_path / "experiments" / "widths")
    folder.begin(PLAN, Manifest(config=parse_config(PLAN, "plan"), started=now_text()))
    async with live_server(tmp_path, start=start) as server:
        assert (await server.experiments.get("widths")).state == "running"


def test_a_file_that_is_not_a_plan_is_a_configuration_error(tmp_path: Path) -> None:
    bad = plan_file(tmp_path, PLAN.replace("hash", "sometimes"))
    make_key(tmp_path / "keys.yaml", "ada")
    for path, reason in ((bad, "line 5: assignment.mode"), (tmp_path / "none.yaml", "cannot be read")):
        with pytest.raises(ConfigError, match=reason):
            Serving(live_config(tmp_path, start=(path,)), lambda _: FakeTokenizer(), factory=NOTING)
    with pytest.raises(ValueError, match="start needs folder"):
        ExperimentsConfig(start=(bad,))


async def test_a_corrupt_folder_affects_only_its_experiment(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
    at = '{"state": "running", "at": "%s"}'
    damages = (("state.json", "{"), ("state.json", at % "now"), ("state.json", at % "2026-11-21T12:00:00"))
    for name, text in (*damages, ("manifest.json", "{}")):
        (tmp_path / "experiments" / "widths" / name).write_text(text)
        async with live_server(tmp_path) as server:
            assert (await server.ask("x")).status_code == 200
            (status,) = await server.experiments.statuses()
            assert (status.state, name in status.reason, status.records) == ("failed", True, {})
            assert (await server.http.get("/v1/experiments/widths")).status_code == 409


def test_each_experiment_has_its_own_folder(tmp_path: Path) -> None:
    folder, config = ExperimentFolder(tmp_path / "widths"), parse_config(PLAN, "plan")
    assert not folder.exists
    folder.begin(PLAN, Manifest(config=config, started=now_text(), facts={"a": "b"}))
    assert folder.exists
    assert (folder.plan_text(), folder.manifest().config, folder.written()) == (PLAN, config, {})
    assert folder.state().state == "stopped"
    state = StoredState(state="failed", at=now_text(), reason="why", records={"a": 3})
    folder.note(state)
    assert folder.state() == state
    (folder.path / "plan.yaml").unlink()
    with pytest.raises(ExperimentError, match="cannot be read"):
        folder.plan_text()
