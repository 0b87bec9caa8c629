"""Shadow requests are sent, their output is dropped, and they delay no other request."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from specdec.api.v1 import generation_pb2
from specdec.core.types import Request
from tests.server.experiment.live.live_server import LiveServer, live_server
from tests.server.harness import unread_bytes

PLAN = """\
name: widths
arms:
  narrow: {request: {speculation: {width: 1}}}
  wide: {request: {speculation: {width: 2}}}
assignment: {mode: shadow}
"""
BESIDE = PLAN.replace("mode: shadow", "mode: shadow, shadow: beside")


def shadows(server: LiveServer) -> list[dict[str, Any]]:
    return [note for note in server.got() if "~" in note["id"]]


@pytest.mark.parametrize("plan", [PLAN, BESIDE], ids=["after", "beside"])
async def test_a_pair_has_both_arms_and_one_answer(server: LiveServer, plan: str) -> None:
    await server.experiments.start(plan)
    for i in range(5):
        answer = await server.ask(f"te{i}", session="s")
        assert answer.json()["choices"][0]["text"] == f"\x02te{i}"  # the engine echoes, once
        assert answer.headers["x-specdec-arm"] == "widths=narrow"
        await server.recorded(2 * (i + 1))
        assert server.serving.client.in_flight == unread_bytes(server.serving.client) == 0  # no reader, no memory
    records = server.records()
    pairs: dict[str, dict[str, Any]] = {}
    for record in records:
        pairs.setdefault(record.pair, {})[record.arm] = record
    assert len(pairs) == 5
    for pair in pairs.values():
        assert set(pair) == {"narrow", "wide"}
        assert pair["narrow"].token_hash == pair["wide"].token_hash != b""
        assert pair["narrow"].chunks > pair["wide"].chunks
    assert [(note["width"], note["priority"]) for note in server.got() if "~" not in note["id"]] == [(1, 0)] * 5
    assert [(note["width"], note["priority"] < -(1 << 30)) for note in shadows(server)] == [(2, True)] * 5
    for note in shadows(server):
        assert note["salt"] == "ops/"  # the caller's own salt, so the cache of no other caller changes


async def test_a_shadow_shares_nothing_with_the_control(tmp_path: Path) -> None:
    plan = PLAN.replace("{width: 1}", "{max_depth: 3}")
    async with live_server(tmp_path) as server:
        await server.experiments.start(plan)
        await server.ask("t")
        await server.recorded(2)
        assert [(note["width"], note["depth"]) for note in server.got()] == [(None, 3), (2, None)]


async def test_a_shadow_has_the_arms_of_other_experiments(tmp_path: Path) -> None:
    other = PLAN.replace("widths", "depths").replace("width:", "max_depth:").replace("shadow", "hash")
    async with live_server(tmp_path) as server:
        await server.experiments.start(PLAN)
        await server.experiments.start(other)
        arm = (await server.ask("t")).headers["x-specdec-arm"]
        await server.recorded(2)
        depth = 1 if "depths=narrow" in arm else 2
        assert [(note["width"], note["depth"]) for note in server.got()] == [(1, depth), (2, depth)]


class Windows:
    """Every prompt has a window."""

    def predict(self, request: Request) -> Request:
        return dataclasses.replace(request, prediction_ids=(1, 2, 3), prediction_form="zeta")


async def test_bug_a_shadow_has_the_prediction_of_its_window(
    server: LiveServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    await server.experiments.start(PLAN)
    model = server.serving.models.first
    sent: list[Request] = []
    generate = model.client.generate

    def noted(request: Request, *more: Any) -> Any:
        sent.append(request)
        return generate(request, *more)

    monkeypatch.setattr(model.client, "generate", noted)
    monkeypatch.setattr(model.admission, "windows", Windows())
    await server.ask("te1")
    await server.recorded(2)
    assert [(request.prediction_ids, request.prediction_form) for request in sent] == [((1, 2, 3), "zeta")] * 2


async def test_a_token_mismatch_is_detected(server: LiveServer) -> None:
    await server.experiments.start(PLAN)
    await server.ask("abcdef", cache_salt="odd")
    first, second = await server.recorded(2)
    assert first.token_hash != second.token_hash


async def test_both_have_the_same_seed(server: LiveServer) -> None:
    await server.experiments.start(PLAN)
    messages, _ = await server.stream("x")
    await server.recorded(2)
    seeds = [note["seed"] for note in server.got()]
    assert seeds[0] == seeds[1] == messages[0].started.seed
    await server.ask("y", seed=7)
    await server.ask("z", temperature=0)
    await server.recorded(6)
    by_text = {note["text"]: note["seed"] for note in server.got()}
    assert (by_text["y"], by_text["z"]) == (7, None)


async def test_answers_that_depend_on_time_are_not_compared(server: LiveServer) -> None:
    await server.experiments.start(PLAN)
    request = generation_pb2.GenerateStreamRequest(text="hello")
    request.stopping.time_limit_ms = 5000
    async for _ in server.generation.GenerateStream(request, metadata=server.metadata()):
        pass
    assert {record.token_hash for record in await server.recorded(2)} == {b""}


async def test_an_incomplete_pair_is_not_written(server: LiveServer) -> None:
    await server.experiments.start(BESIDE)
    request = generation_pb2.GenerateStreamRequest(text="x" * 100)
    request.cache.salt = "held"
    call = server.generation.GenerateStream(request, metadata=server.metadata())
    await anext(aiter(call))
    await server.comes_to(lambda: len(shadows(server)) == 1)
    call.cancel()  # its shadow has to end too, or it would run without a reader
    await server.comes_to(lambda: server.serving.client.in_flight == 0)
    await server.experiments.stop("widths")
    assert server.records() == []


async def test_a_shadow_is_preempted_by_any_request(server: LiveServer) -> None:
    """The engine has two places."""
    await server.experiments.start(BESIDE)
    slow = generation_pb2.GenerateStreamRequest(text="x" * 100)
    slow.cache.salt = "held"
    first = server.generation.GenerateStream(slow, metadata=server.metadata())
    await anext(aiter(first))
    await server.comes_to(lambda: len(shadows(server)) == 1)
    assert server.serving.client.in_flight == 2
    second = server.generation.GenerateStream(slow, metadata=server.metadata())
    await anext(aiter(second))
    assert server.serving.client.in_flight == 2  # both are somebody's
    assert len(shadows(server)) == 1  # and the second one's shadow was not even sent
    assert (await server.experiments.get("widths")).given_up == 2
    for call in (first, second):
        call.cancel()
    await server.comes_to(lambda: server.serving.client.in_flight == 0)


async def test_every_sample_needs_a_place(server: LiveServer) -> None:
    """The engine has two places."""
    await server.experiments.start(BESIDE)
    two = generation_pb2.GenerateStreamRequest(text="x" * 100)
    two.cache.salt = "held"
    two.sampling.n = 2
    call = server.generation.GenerateStream(two, metadata=server.metadata())
    await anext(aiter(call))
    await server.ask("y")
    assert shadows(server) == []
    assert (await server.experiments.get("widths")).given_up == 2
    call.cancel()
    await server.comes_to(lambda: server.serving.client.in_flight == 0)


async def test_shadows_do_not_count_towards_limits_or_metrics(server: LiveServer) -> None:
    await server.experiments.start(PLAN)
    for i in range(3):
        await server.ask(f"t{i}")
    await server.recorded(6)
    assert len(shadows(server)) == 3
    metrics = (await server.http.get("/metrics")).text
    for name in ("generation", "prompt"):  # the engine echoes the prompt
        assert f"specdec_{name}_tokens_total {3 * 3:.1f}" in metrics
    assert server.serving.models.first.admission.in_flight == 0


async def test_stopping_ends_the_shadows(server: LiveServer) -> None:
    await server.experiments.start(BESIDE)
    slow = generation_pb2.GenerateStreamRequest(text="x" * 12)
    slow.cache.salt = "held"
    call = server.generation.GenerateStream(slow, metadata=server.metadata())
    await anext(aiter(call))
    await server.comes_to(lambda: len(shadows(server)) == 1)
    await server.experiments.stop("widths")
    assert server.serving.client.in_flight == 1
    call.cancel()
    await server.comes_to(lambda: server.serving.client.in_flight == 0)
