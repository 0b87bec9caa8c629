"""Live experiments end to end: both faces, an engine in its own process, records on the disk."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import aclosing
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import grpc
import pytest

from server.admission import run_requests
from server.auth.principal import ANYBODY, Principal
from server.engine_supervisor import EngineState
from server.experiment.live.traffic import NO_ARM, NO_INDEX, NO_PRIORITY, OWN_OPTIONS, LiveTraffic
from server.experiment.records import NO_BLOCK
from server.observe.records import RequestRecord
from server.request_stream import RequestStream, UnreadEvents
from specdec.api.v1 import completion_pb2, generation_pb2, options_pb2
from specdec.core.types import Request, SpeculationParams
from specdec.errors import QueueFullError
from tests.server.experiment.live.live_server import PLAN, LiveServer, live_server

WIDTHS = {"widths=narrow": 1, "widths=wide": 2}


async def started(server: LiveServer, text: str = PLAN) -> Any:
    return await server.experiments.start(text)


async def test_arms_differ_in_the_engine_and_are_reported_by_both_apis(server: LiveServer) -> None:
    before = await server.ask("before")
    assert "x-specdec-arm" not in before.headers
    await started(server)
    reported: dict[str, str] = {}
    for i in range(12):
        answer = await server.ask(f"h{i}", stream=bool(i % 2))
        assert answer.status_code == 200
        reported[f"h{i}"] = answer.headers["x-specdec-arm"]
        messages, trailers = await server.stream(f"g{i}")
        assert messages[0].started.arm == trailers["x-specdec-arm"]
        reported[f"g{i}"] = messages[0].started.arm
    whole = server.generation.Generate(
        generation_pb2.GenerateRequest(text="w", request_id="w"), metadata=server.metadata()
    )
    await whole
    reported["w"] = str(dict(await whole.trailing_metadata())["x-specdec-arm"])
    assert set(reported.values()) == set(WIDTHS)
    got = {note["text"]: note for note in server.got()}
    assert (got["before"]["width"], got["before"]["priority"]) == (None, 0)
    for text, arm in reported.items():
        assert got[text]["width"] == WIDTHS[arm]
        assert got[text]["priority"] == (3 if arm == "widths=wide" else 0)
    records = await server.recorded(25)
    assert len({record.request for record in records}) == len(records) == 25
    assert Counter(f"widths={record.arm}" for record in records) == Counter(reported.values())
    await server.experiments.stop("widths")
    assert "x-specdec-arm" not in (await server.ask("after")).headers
    assert len(server.records()) == 25
    assert server.serving.models.first.admission.experiments is None


async def test_a_record_has_the_figures_of_the_request(tmp_path: Path) -> None:
    async with live_server(tmp_path) as server:
        await started(server, PLAN)
        await server.ask("hello", arm="")
        (record,) = await server.recorded(1)
        assert record.ok
        assert record.arrival <= (record.started or 0) <= (record.first_token or 0) <= (record.end or 0)
        assert record.end is not None
        assert 0 < record.end - record.arrival < 10
        assert record.arrival > 1.7e9
        assert (record.tokens, record.cached_tokens) == (4, 3)
        assert record.accepted == (1 + 2, 1, 1)  # the engine's histogram, and two steps without a draft
        assert (record.block, record.pair, record.key) == (NO_BLOCK, "", "")
        assert not record.overridden


async def test_failed_and_cancelled_requests_are_recorded(server: LiveServer) -> None:
    await started(server)
    assert (await server.ask("x", cache_salt="broken")).status_code == 500
    call = server.generation.GenerateStream(
        generation_pb2.GenerateStreamRequest(text="x" * 90, cache=options_pb2.CacheOptions(salt="held")),
        metadata=server.metadata(),
    )
    await anext(aiter(call))
    call.cancel()
    assert (await server.ask("x", cache_salt="full")).status_code == 429  # the engine's refusal
    records = await server.recorded(3)
    assert Counter(record.status for record in records) == {"MODEL_BROKEN": 1, "cancelled": 1, "QUEUE_FULL": 1}


async def test_bug_refused_requests_count_towards_the_limit(server: LiveServer) -> None:
    await started(server, PLAN + "stopping: {max_requests: 2}\n")
    traffic = server.serving.models.first.admission.experiments
    assert traffic is not None

    def full(*_: Any) -> RequestStream:
        raise QueueFullError(1, 1.0)

    for name in ("x", "y"):
        with pytest.raises(QueueFullError):
            traffic.admit(ANYBODY, Request(request_id=name, prompt_ids=(1,)), "", full)
    async with asyncio.timeout(15):
        while (status := await server.experiments.get("widths")).state == "running":
            await asyncio.sleep(0.01)
    assert (status.state, status.reason) == ("finished", "2 requests were recorded")


async def test_bug_a_prompt_that_waits_for_others_of_its_call_is_recorded_once(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A call of several prompts takes the room itself, and asks again for those that were refused."""
    await started(server)
    monkeypatch.setattr(server.serving.models.first.admission, "_max_tokens", 4)
    own: dict[str, Any] = {"speculation": {"width": 3}}
    for options in ({}, own):
        answer = await server.ask("x", prompt=["many", "more", "last"], **options)
        assert (answer.status_code, len(answer.json()["choices"])) == (200, 3)
    traffic = server.serving.models.first.admission.experiments
    assert isinstance(traffic, LiveTraffic)

    def refused_by_the_engine(principal: Principal, request: Request, supersedes_key: str) -> RequestStream:
        record = RequestRecord(request, None, Mock(), Mock())
        return RequestStream(request, lambda complete: None, record, UnreadEvents())

    for speculation in (SpeculationParams(), SpeculationParams(width=3)):
        request = Request(request_id="x", prompt_ids=(1,), speculation=speculation)
        again = traffic.admit(ANYBODY, request, "", refused_by_the_engine, asks_again=True)
        again.fail(QueueFullError(1, 1.0))
        again.close()
    assert (await server.experiments.get("widths")).left_out == {OWN_OPTIONS: 3}
    await server.experiments.stop("widths")
    assert [record.status for record in server.records()] == ["ok"] * 3


async def test_bug_a_refusal_that_ends_its_call_is_recorded(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await started(server)
    admission = server.serving.models.first.admission
    with pytest.raises(QueueFullError):  # by the engine
        _ = [event async for event in run_requests(admission, [Request("c", (1,), cache_salt="full")])]
    monkeypatch.setattr(admission, "_max_tokens", 4)
    call = [Request(name, tuple(b"many")) for name in ("a", "b")]
    async with aclosing(run_requests(admission, call)) as events:
        await anext(events)
        monkeypatch.setattr(admission, "_check_room", Mock(side_effect=QueueFullError(1, 1.0)))  # others have taken it
        with pytest.raises(QueueFullError):
            _ = [event async for event in events]
    await server.experiments.stop("widths")
    found = {record.request.partition("#")[0]: record.status for record in server.records()}
    assert (found["a"], found["b"], found["c"]) == ("ok", "QUEUE_FULL", "QUEUE_FULL")


async def test_bug_a_request_that_its_caller_gets_wrong_is_no_failure_of_an_arm(server: LiveServer) -> None:
    await started(server)
    scheduling = options_pb2.SchedulingOptions(supersedes_key="k" * 1025)
    with pytest.raises(grpc.aio.AioRpcError, match="supersedes_key"):
        await server.stream("x", scheduling=scheduling)
    for script in ("malformed", "long"):  # refused by the engine, as a grammar is once it was compiled
        assert (await server.ask("x", cache_salt=script)).status_code == 400
    await server.experiments.stop("widths")
    assert server.records() == []


async def test_a_session_keeps_its_arm_and_a_request_without_one_takes_no_part(tmp_path: Path) -> None:
    plan = PLAN.replace("mode: hash", "mode: hash, unit: session")
    async with live_server(tmp_path) as server:
        await started(server, plan)
        arms: dict[str, set[str]] = {}
        for i in range(24):
            session = f"s{i % 8}"
            answer = await server.ask(f"t{i}", session=session)
            arms.setdefault(session, set()).add(answer.headers["x-specdec-arm"])
        assert all(len(found) == 1 for found in arms.values())
        assert set.union(*arms.values()) == set(WIDTHS)
        assert "x-specdec-arm" not in (await server.ask("none")).headers
        assert (await server.experiments.get("widths")).left_out == {NO_ARM: 1}
        records = await server.recorded(24)
        assert len({record.key for record in records}) == 8
        assert not any("s" in record.key for record in records)  # hex of a hash


async def test_fields_set_by_a_request_win_in_either_arm(server: LiveServer) -> None:
    await started(server)
    for i in range(6):
        answer = await server.ask(f"own{i}", speculation={"width": 3})
        assert "x-specdec-arm" not in answer.headers
        await server.ask(f"prio{i}", priority=1)
    got = {note["text"]: note for note in server.got()}
    assert {got[f"own{i}"]["width"] for i in range(6)} == {3}
    assert {(got[f"prio{i}"]["width"], got[f"prio{i}"]["priority"]) for i in range(6)} == {(None, 1)}
    assert (await server.experiments.get("widths")).left_out == {OWN_OPTIONS: 12}
    assert server.records() == []


async def test_a_key_without_an_arms_index_takes_no_part(tmp_path: Path) -> None:
    plan = PLAN.replace("{width: 1}", "{width: 1, indexes: [docs]}")
    async with live_server(tmp_path) as server:
        await started(server, plan)
        for i in range(6):
            answer = await server.http.post(
                "/v1/completions",
                json={"prompt": f"bob{i}", "max_tokens": 1},
                headers={"x-request-id": f"bob{i}", "authorization": f"Bearer {server.code_key}"},
            )
            assert answer.status_code == 200
            assert "x-specdec-arm" not in answer.headers
            assert "x-specdec-arm" in (await server.ask(f"boss{i}")).headers
        assert (await server.experiments.get("widths")).left_out == {NO_INDEX: 6}


@pytest.mark.parametrize(("priority", "left_out"), [(3, {NO_PRIORITY: 6}), (2, {})])
async def test_bug_a_key_whose_priority_an_arm_exceeds_takes_no_part(
    server: LiveServer, priority: int, left_out: dict[str, int]
) -> None:
    await started(server, PLAN.replace("priority: 3", f"priority: {priority}"))
    for i in range(6):
        answer = await server.http.post(
            "/v1/completions",
            json={"prompt": f"cleo{i}", "max_tokens": 1},
            headers={"x-request-id": f"cleo{i}", "authorization": f"Bearer {server.low_key}"},
        )
        assert ("x-specdec-arm" in answer.headers) == (not left_out)
        assert "x-specdec-arm" in (await server.ask(f"boss{i}")).headers
    assert (await server.experiments.get("widths")).left_out == left_out


async def test_cache_warming_takes_no_part(server: LiveServer) -> None:
    await started(server)
    await server.ask("warm", max_tokens=0)
    await server.generation.Prefill(generation_pb2.PrefillRequest(text="warm"), metadata=server.metadata())
    assert {note["width"] for note in server.got()} == {None}
    await server.experiments.stop("widths")
    assert server.records() == []


async def test_callers_choose_their_arm_if_the_plan_allows_it(tmp_path: Path) -> None:
    plan = PLAN.replace("mode: hash", "mode: hash, allow_override: true")
    async with live_server(tmp_path) as server:
        await started(server, plan)
        for i in range(4):
            answer = await server.ask(f"n{i}", arm="widths=narrow")
            assert answer.headers["x-specdec-arm"] == "widths=narrow"
            _, trailers = await server.stream(f"w{i}", arm="widths=wide, unheard=of")
            assert trailers["x-specdec-arm"] == "widths=wide"
        got = {note["text"]: note["width"] for note in server.got()}
        assert [got[f"n{i}"] for i in range(4)] == [1] * 4
        assert [got[f"w{i}"] for i in range(4)] == [2] * 4
        records = await server.recorded(8)
        assert all(record.overridden for record in records)
        answer = await server.ask("x", arm="widths=broad")
        assert answer.status_code == 400
        assert "its arms are narrow, wide" in answer.json()["error"]["message"]
        assert answer.json()["error"]["param"] == "x-specdec-arm"
        assert (await server.ask("x", arm="widths")).status_code == 400
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stream("x", arm="widths=broad")
        assert caught.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert (await server.ask("x", arm="other=arm")).status_code == 200  # affects no other request


async def test_callers_do_not_choose_unless_the_plan_allows_it(tmp_path: Path) -> None:
    async with live_server(tmp_path) as server:
        assert (await server.ask("x", arm="widths=wide")).status_code == 200  # while nothing runs
        await started(server)
        answer = await server.ask("x", arm="widths=wide")
        assert answer.status_code == 400
        assert "does not allow callers to choose" in answer.json()["error"]["message"]


async def test_two_experiments_on_two_settings_run_together(tmp_path: Path) -> None:
    depths = "name: depths\narms: {a: {}, b: {request: {speculation: {max_depth: 4}}}}\nassignment: {mode: hash}\n"
    async with live_server(tmp_path) as server:
        await started(server)
        await started(server, depths)
        seen = set()
        for i in range(24):
            reported = dict(
                part.split("=") for part in (await server.ask(f"t{i}")).headers["x-specdec-arm"].split(", ")
            )
            note = next(note for note in server.got() if note["text"] == f"t{i}")
            assert note["width"] == WIDTHS[f"widths={reported['widths']}"]
            assert note["depth"] == {"a": None, "b": 4}[reported["depths"]]
            seen.add((reported["widths"], reported["depths"]))
        assert len(seen) == 4
        assert len(await server.recorded(24)) == len(await server.recorded(24, "depths")) == 24


async def test_an_aa_splits_requests_and_changes_nothing(server: LiveServer) -> None:
    await started(server, "name: same\narms: {a: {}, b: {}}\nassignment: {mode: aa}\n")
    arms = {(await server.ask(f"t{i}")).headers["x-specdec-arm"] for i in range(16)}
    assert arms == {"same=a", "same=b"}
    assert {(note["width"], note["mode"]) for note in server.got()} == {(None, "auto")}


async def test_a_switchback_serves_blocks(tmp_path: Path) -> None:
    plan = PLAN.replace("mode: hash", "mode: switchback, block_s: 150ms, washout_s: 50ms")
    async with live_server(tmp_path) as server:
        await started(server, plan)
        count = 0
        arms: set[str] = set()
        async with asyncio.timeout(30):
            while len(arms) < 2 or not any(record.warm_up for record in server.records()) or count < 20:
                arms.add((await server.ask(f"t{count}")).headers["x-specdec-arm"])
                count += 1
                await asyncio.sleep(0.01)
        records = await server.recorded(count)
        by_block: dict[int, set[str]] = {}
        got = {note["id"].partition("/")[2]: note["width"] for note in server.got()}
        for record in records:
            by_block.setdefault(record.block, set()).add(record.arm)
            assert got[record.request.partition("#")[0]] == WIDTHS[f"widths={record.arm}"]
            assert record.end is not None
            assert record.arrival // 0.15 <= record.block <= record.end // 0.15
        assert all(len(found) == 1 for found in by_block.values())


async def test_a_switchback_changes_the_engine_and_restores_it(tmp_path: Path) -> None:
    plan = (
        "name: drafts\narms:\n  none: {engine: {draft: null, flush_cache: true}}\n"
        "  small: {engine: {draft: small, flush_cache: true}}\n"
        "assignment: {mode: switchback, block_s: 200ms, washout_s: 10ms}\n"
    )
    async with live_server(tmp_path, "old") as server:
        await started(server, plan)
        count = 0
        seen: set[str] = set()
        async with asyncio.timeout(30):
            while len(seen) < 2:
                await server.ask(f"t{count}")
                count += 1
                await asyncio.sleep(0.01)
                seen = {record.arm for record in server.records("drafts") if not record.warm_up}
        records = await server.recorded(count, "drafts")
        notes = {note["id"].partition("/")[2]: note for note in server.got()}
        for record in records:
            note = notes[record.request.partition("#")[0]]
            if not record.warm_up:
                assert note["draft"] == {"none": None, "small": "small"}[record.arm]
        assert max(note["flushed"] for note in notes.values()) >= 2
        await server.experiments.stop("drafts")
        assert server.serving.client.info.draft == "old"


async def test_an_experiment_that_flushes_keeps_an_operators_draft(tmp_path: Path) -> None:
    plan = (
        "name: flush\narms: {a: {engine: {flush_cache: true}}, b: {engine: {flush_cache: false}}}\n"
        "assignment: {mode: switchback, block_s: 1h, washout_s: 0}\n"
    )
    async with live_server(tmp_path, "old") as server:
        await started(server, plan)
        await server.serving.client.swap_draft("small")
        await server.experiments.stop("flush")
        assert server.serving.client.info.draft == "small"


@pytest.mark.parametrize(("a", "b"), [("missing", "broken"), ("a-head", "a-head-too")])
async def test_an_engine_that_cannot_be_switched_ends_the_experiment(tmp_path: Path, a: str, b: str) -> None:
    plan = (
        f"name: drafts\narms: {{a: {{engine: {{draft: {a}}}}}, b: {{engine: {{draft: {b}}}}}}}\n"
        "assignment: {mode: switchback, block_s: 10, washout_s: 1}\n"
    )
    async with live_server(tmp_path, "old") as server:
        await server.serving.client.swap_draft("a-head-before")
        await started(server, plan)
        async with asyncio.timeout(15):
            while (status := await server.experiments.get("drafts")).state == "running":
                assert (await server.ask()).status_code == 200
        assert status.state == "failed"
        assert "cannot be switched" in status.reason
        assert (server.serving.client.info.draft, server.serving.client.info.head) == ("old", "a-head-before")
        assert "x-specdec-arm" not in (await server.ask()).headers


async def test_editor_completions_take_part(server: LiveServer) -> None:
    await started(server)
    request = completion_pb2.CompleteRequest(fim=options_pb2.FimPrompt(prefix="def f():\n", suffix=""))
    request.completion.mode = completion_pb2.CompletionOptions.MODE_PREFIX
    call = server.completion.Complete(request, metadata=server.metadata())
    messages = [message async for message in call]
    (record,) = await server.recorded(1)
    assert messages[0].started.arm == f"widths={record.arm}"


async def test_bug_a_stop_while_the_engine_restarts_restores_its_draft(tmp_path: Path) -> None:
    plan = (
        "name: drafts\narms: {a: {engine: {draft: small}}, b: {engine: {draft: large}}}\n"
        "assignment: {mode: switchback, block_s: 1h, washout_s: 0}\n"
    )
    async with live_server(tmp_path, draft="old") as server:
        engine = server.serving.client.engine
        await server.experiments.start(plan)
        await server.comes_to(lambda: server.serving.client.info.draft in ("small", "large"))
        change = engine.change
        assert engine.state == EngineState.READY
        assert (await server.ask("x", cache_salt="die")).status_code == 503
        await change.wait()
        status = await server.experiments.stop("drafts")
        assert status.reason == "it was stopped by a call"
        assert (server.serving.client.info.draft, server.serving.client.draft_setting) == ("old", ("old", None))


async def test_bug_a_block_whose_draft_a_restart_refuses_is_not_analysed(tmp_path: Path) -> None:
    plan = (
        "name: drafts\narms:\n  a: {engine: {draft: gone, draft_dtype: int8}}\n"
        "  b: {engine: {draft: gone, draft_dtype: int4}}\n"
        "assignment: {mode: switchback, block_s: 1h, washout_s: 0}\n"
    )
    async with live_server(tmp_path, draft="old") as server:
        await server.experiments.start(plan)
        await server.comes_to(lambda: server.serving.client.info.draft != "old")
        assert (await server.ask("before")).status_code == 200
        (before,) = server.got()
        assert (await server.ask("killer", cache_salt="die")).status_code == 503
        await server.comes_to(lambda: server.serving.client.info.draft == "old")  # the arm's cannot be loaded again
        assert (await server.ask("after")).status_code == 200
        first, _, last = await server.recorded(3, "drafts")
        after = server.got()[-1]
    assert (before["draft"][:4], first.warm_up) == ("gone", False)
    assert (after["draft"], last.warm_up) == ("old", True)
