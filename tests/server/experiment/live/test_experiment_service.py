"""Operators' use of live experiments, over gRPC, over HTTP and at the command line."""

from __future__ import annotations

import asyncio
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner, Result
from google.rpc.error_details_pb2 import BadRequest, ErrorInfo

from server.experiment.analysis.result import Result as Analysis
from server.experiment.folder import ExperimentFolder
from server.experiment.records import RecordWriter
from specdec.api.v1 import experiment_pb2 as pb
from specdec.cli.main import cli
from specdec.client.client import ExperimentClient
from specdec.client.connection import CallError
from tests.server.experiment.live.live_server import PLAN, LiveServer, live_server
from tests.server.experiment.simulated import paired
from tests.server.harness import failed, rich

PATH = "/v1/experiments"
OTHER = "name: more\narms: {a: {}, b: {request: {speculation: {width: 5}}}}\nassignment: {mode: hash}\n"
CODE = grpc.StatusCode


def calls(server: LiveServer) -> list[tuple[Any, Any]]:
    return [
        (server.stub.StartExperiment, pb.StartExperimentRequest(plan=PLAN)),
        (server.stub.StopExperiment, pb.StopExperimentRequest(name="widths")),
        (server.stub.GetExperiment, pb.GetExperimentRequest(name="widths")),
        (server.stub.ListExperiments, pb.ListExperimentsRequest()),
        (server.stub.GetExperimentResult, pb.GetExperimentResultRequest(name="widths")),
    ]


HTTP_CALLS = [
    ("POST", PATH), ("GET", PATH), ("GET", f"{PATH}/widths"), ("GET", f"{PATH}/widths/report"),
    ("DELETE", f"{PATH}/widths"),
]  # fmt: skip


async def test_only_operators_are_authorized(server: LiveServer) -> None:
    for method, request in calls(server):
        error = await failed(method(request, metadata=server.metadata(server.user_key)))
        assert error.code() == CODE.PERMISSION_DENIED
        assert rich(error)[ErrorInfo].reason == "PERMISSION_DENIED"
        assert (await failed(method(request))).code() == CODE.UNAUTHENTICATED
    for verb, path in HTTP_CALLS:
        headers = {"authorization": f"Bearer {server.user_key}"}
        answer = await server.http.request(verb, path, headers=headers, content=PLAN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (403, "permission_denied")
        strange = await server.http.request(verb, path, headers={"authorization": "Bearer none"}, content=PLAN)
        assert strange.status_code == 401
    assert not server.folder.exists()


async def test_over_grpc(server: LiveServer) -> None:
    start, stop, get, every, result = (method for method, _ in calls(server))
    meta = server.metadata()
    made = (await start(pb.StartExperimentRequest(plan=PLAN), metadata=meta)).experiment
    assert (made.name, made.mode, made.state) == ("widths", "hash", pb.EXPERIMENT_STATE_RUNNING)
    assert [(arm.arm, arm.records) for arm in made.arms] == [("narrow", 0), ("wide", 0)]
    error = await failed(result(pb.GetExperimentResultRequest(name="widths"), metadata=meta))
    assert (error.code(), rich(error)[ErrorInfo].reason) == (CODE.FAILED_PRECONDITION, "EXPERIMENT_NO_RESULT")
    for i in range(10):
        await server.ask(f"t{i}")
    await server.ask("own", priority=2)
    await server.recorded(10)
    seen = (await get(pb.GetExperimentRequest(name="widths"), metadata=meta)).experiment
    assert sum(arm.records for arm in seen.arms) == 10
    assert dict(seen.left_out) == {"set their own options": 1}
    reply = await result(pb.GetExperimentResultRequest(name="widths", report=True), metadata=meta)
    assert reply.verdict in ("better", "worse", "equivalent", "undecided", "invalid")
    assert reply.headline
    assert sum(arm.requests for arm in Analysis.model_validate_json(reply.result_json).arms) == 10
    assert reply.report_html.startswith("<!DOCTYPE html>") or "<html" in reply.report_html
    ended = (await stop(pb.StopExperimentRequest(name="widths"), metadata=meta)).experiment
    assert (ended.state, bool(ended.reason)) == (pb.EXPERIMENT_STATE_STOPPED, True)
    listed = (await every(pb.ListExperimentsRequest(), metadata=meta)).experiments
    assert [(one.name, sum(arm.records for arm in one.arms)) for one in listed] == [("widths", 10)]
    for method, request in ((stop, pb.StopExperimentRequest), (get, pb.GetExperimentRequest)):
        for name in ("none", "../widths", ""):
            error = await failed(method(request(name=name), metadata=meta))
            assert (error.code(), rich(error)[ErrorInfo].reason) == (CODE.NOT_FOUND, "EXPERIMENT_NOT_FOUND")
            assert "`specdec ab status` lists" in error.details()


async def test_over_http(server: LiveServer) -> None:
    made = await server.http.post(PATH, content=PLAN, headers={"content-type": "application/yaml"})
    assert made.status_code == 201
    assert made.json() | {"started": ""} == {
        "name": "widths", "state": "running", "mode": "hash", "started": "", "records": {"narrow": 0, "wide": 0},
        "reason": "", "left_out": {}, "warnings": [],
    }  # fmt: skip
    early = (await server.http.get(f"{PATH}/widths")).json()
    assert early["result"] is None
    assert early["note"] == "arm 'narrow' has no record yet"
    assert (await server.http.get(f"{PATH}/widths/report")).status_code == 409
    for i in range(10):
        await server.ask(f"t{i}")
    await server.recorded(10)
    shown = (await server.http.get(f"{PATH}/widths")).json()
    assert sum(shown["records"].values()) == 10
    assert shown["result"]["verdict"]["headline"]
    report = await server.http.get(f"{PATH}/widths/report")
    assert report.headers["content-type"].startswith("text/html")
    assert shown["result"]["verdict"]["headline"][:20] in report.text
    ended = await server.http.delete(f"{PATH}/widths")
    assert (ended.status_code, ended.json()["state"]) == (200, "stopped")
    listed = (await server.http.get(PATH)).json()["experiments"]
    assert [(one["name"], one["state"], sum(one["records"].values())) for one in listed] == [("widths", "stopped", 10)]
    assert (await server.http.delete(f"{PATH}/widths")).json() == ended.json()
    assert (await server.http.delete(f"{PATH}/none")).status_code == 404
    assert (await server.http.get(f"{PATH}/none")).json()["error"]["code"] == "experiment_not_found"
    plan = {"name": "json", "arms": {"a": {}, "b": {"request": {"priority": 1}}}, "assignment": {"mode": "hash"}}
    assert (await server.http.post(PATH, json=plan)).status_code == 201


async def test_bad_plans_are_rejected_with_line_and_reason(server: LiveServer) -> None:
    bad = PLAN.replace("width: 1", "breadth: 1").replace("mode: hash", "mode: hash, sault: 1")
    answer = await server.http.post(PATH, content=bad)
    assert answer.status_code == 400
    assert "line 5: assignment.sault" in answer.json()["error"]["message"]
    error = await failed(
        server.stub.StartExperiment(
            pb.StartExperimentRequest(plan=bad.replace(", sault: 1", "")), metadata=server.metadata()
        )
    )
    assert error.code() == CODE.INVALID_ARGUMENT
    (violation,) = rich(error)[BadRequest].field_violations
    assert violation.field == "plan"
    assert violation.description.startswith("line 3: arms.narrow.request.speculation.breadth: an arm cannot change it")
    assert violation.description.endswith("priority, target_tpot_ms, cache_salt")  # whole
    assert (await server.http.post(PATH, content=b"\xff\xfe")).status_code == 400
    assert not server.folder.exists()


async def test_conflicts_are_named(server: LiveServer) -> None:
    assert (await server.http.post(PATH, content=PLAN)).status_code == 201
    answer = await server.http.post(PATH, content=OTHER)
    assert (answer.status_code, answer.json()["error"]["code"]) == (409, "experiment_not_started")
    assert "more and widths both change speculation.width" in answer.json()["error"]["message"]
    again = await server.http.post(PATH, content=PLAN)
    assert "widths is already running" in again.json()["error"]["message"]
    await server.ask("recorded")
    await server.http.delete(f"{PATH}/widths")
    assert (await server.http.post(PATH, content=OTHER)).status_code == 201
    changed = await server.http.post(PATH, content=PLAN.replace("width: 2", "width: 3"))
    assert changed.status_code == 409  # both the setting and the records are another's
    await server.http.delete(f"{PATH}/more")
    changed = await server.http.post(PATH, content=PLAN.replace("width: 2", "width: 3"))
    assert (
        "with another plan (plan.arms.wide.request.speculation.width was 2 and is 3)"
        in changed.json()["error"]["message"]
    )


async def test_without_a_folder_the_server_stores_no_experiment(tmp_path: Path) -> None:
    async with live_server(tmp_path, folder=None) as server:
        assert (await server.http.post(PATH, content=PLAN)).status_code == 501
        error = await failed(
            server.stub.StartExperiment(pb.StartExperimentRequest(plan=PLAN), metadata=server.metadata())
        )
        assert (error.code(), rich(error)[ErrorInfo].reason) == (CODE.UNIMPLEMENTED, "EXPERIMENTS_OFF")
        assert (await server.http.get(PATH)).json() == {"experiments": []}


async def test_an_unwritable_folder_is_reported(tmp_path: Path) -> None:
    (tmp_path / "experiments").write_text("in the way")
    async with live_server(tmp_path) as server:
        answer = await server.http.post(PATH, content=PLAN)
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "experiment_not_started")
        assert "cannot be written" in answer.json()["error"]["message"]


async def test_an_experiment_ends_as_planned(tmp_path: Path) -> None:
    short = PLAN.replace("widths", "short") + "stopping: {max_requests: 5}\n"
    timed = "name: timed\narms: {a: {}, b: {}}\nassignment: {mode: aa}\nstopping: {max_duration: 300ms}\n"
    async with live_server(tmp_path) as server:
        await server.experiments.start(short)
        await server.experiments.start(timed)
        for i in range(8):
            await server.ask(f"t{i}")
        async with asyncio.timeout(10):
            while "running" in {one.state for one in await server.experiments.statuses()}:
                await asyncio.sleep(0.01)
        ended = {one.name: one for one in await server.experiments.statuses()}
        assert (ended["short"].state, sum(ended["short"].records.values())) == ("finished", 5)
        assert len(server.records("short")) == 5
        assert ended["timed"].reason == "its time has passed"
        again = await server.http.post(PATH, content=short)
        assert "has ended: 5 requests were recorded" in again.json()["error"]["message"]


async def test_bug_a_fixed_rule_concludes_only_when_its_experiment_has_ended(tmp_path: Path) -> None:
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN + "guardrails: []\nstopping: {rule: fixed}\n")
        manifest = ExperimentFolder(server.folder / "widths").manifest()
        records = [replace(r, pair="", token_hash=b"") for r in paired(manifest, 60, 0.5, seed=1).records]
        with closing(RecordWriter(server.folder / "widths")) as writer:
            for record in records:
                writer.write(record)
        for i in range(20):  # until both arms have a record of this run
            await server.ask(f"t{i}")
        shown = await run_cli(server, "status", "widths")
        assert (
            "Undecided: the rule `fixed` concludes once, at the end, and the experiment has not ended." in shown.output
        )
        assert "Note: both arms shared one engine" in shown.output
        await server.experiments.stop("widths")
        assert "Better: wide " in (await run_cli(server, "status", "widths")).output


async def run_cli(server: LiveServer, *args: str, key: str | None = None) -> Result:
    key_file = server.folder.parent / "key.txt"
    key_file.write_text((key or server.key) + "\n")
    command = ["ab", *args, "--server", server.address, "--key-file", str(key_file)]
    return await asyncio.to_thread(CliRunner().invoke, cli, command)


async def test_at_the_command_line(tmp_path: Path) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    page = tmp_path / "page.html"
    async with live_server(tmp_path) as server:
        denied = await run_cli(server, "start", str(plan), key=server.user_key)
        assert (denied.exit_code, "PERMISSION_DENIED" in denied.output) == (1, True)
        assert "no experiments" in (await run_cli(server, "status")).output
        made = await run_cli(server, "start", str(plan))
        assert made.output == "widths: running, hash, records: narrow 0, wide 0\n"
        early = await run_cli(server, "status", "widths", "--report", str(page))
        assert "no result yet: " in early.output
        assert (early.exit_code, f"--report: {page} is not written" in early.output) == (1, True)
        assert not page.exists()
        for i in range(10):
            await server.ask(f"t{i}")
        await server.recorded(10)
        shown = await run_cli(server, "status", "widths", "--report", str(page))
        assert shown.exit_code == 0, shown.output
        assert "report: " in shown.output
        assert "<html" in page.read_text()
        ended = await run_cli(server, "stop", "widths")
        assert ended.output.startswith("widths: stopped (it was stopped by a call), hash, records: ")
        assert (await run_cli(server, "stop", "widths")).output == ended.output
        assert (await run_cli(server, "stop", "none")).exit_code == 1
        plan.write_text(PLAN.replace("hash", "sometimes"))
        bad = await run_cli(server, "start", str(plan))
        assert (bad.exit_code, "line 5: assignment.mode" in bad.output) == (1, True)


def test_a_start_waits_for_a_loading_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(PLAN)
    running = pb.Experiment(name="widths", state=pb.EXPERIMENT_STATE_RUNNING, mode="hash")
    loading = CallError(CODE.UNAVAILABLE, "the engine is loading; retry shortly", reason="ENGINE_UNAVAILABLE")
    answers: list[CallError | pb.Experiment] = [loading, loading, running]

    async def start(*_: Any, **__: Any) -> pb.Experiment:
        answer = answers.pop(0)
        if isinstance(answer, CallError):
            raise answer
        return answer

    monkeypatch.setattr(ExperimentClient, "start", start)
    result = CliRunner().invoke(cli, ["ab", "start", str(plan)])
    assert result.stdout == "widths: running, hash, records: none\n"
    assert result.stderr == "waiting for the server: the engine is loading; retry shortly\n"
    assert not answers


async def test_stored_files_name_the_run(server: LiveServer) -> None:
    await server.experiments.start(PLAN)
    kept = ExperimentFolder(server.folder / "widths").manifest()
    assert kept.facts["model"] == "fake"
    assert json.loads((server.folder / "widths" / "state.json").read_text())["state"] == "running"
    assert (server.folder / "widths" / "plan.yaml").read_text() == PLAN
