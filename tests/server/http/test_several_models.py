"""Two models on one port: calls are routed by name, or to the model with the capability. Engines fail independently."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
from click.testing import CliRunner
from grpc_health.v1 import health_pb2, health_pb2_grpc

from server.engine_supervisor import EngineStartError, EngineState
from server.observe.logs import LOGGER
from server.serving import Serving
from specdec.api.v1 import (
    admin_pb2,
    admin_pb2_grpc,
    completion_pb2,
    completion_pb2_grpc,
    generation_pb2_grpc,
    model_pb2,
    model_pb2_grpc,
    options_pb2,
)
from specdec.api.v1 import generation_pb2 as pb
from specdec.cli.main import cli
from specdec.client import Client
from specdec.config import EngineConfig
from tests.fake_engine import BOOK, EMBEDDER, SEVERAL
from tests.server.auth.key_files import make_key
from tests.server.completion.editor import AT, BEHIND, LINE
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.harness import quick_policy
from tests.server.http.harness import CHAT, COMPLETIONS, Server, running_serving
from tests.server.observe.capture.lines import captured_lines
from tests.server.observe.metrics.scrape import Scrape
from tests.server.several_models import ENGINES, make_several, serving, several

BEFORE, AFTER = BOOK[:AT], "\n" + BOOK[BEHIND:]
TALK = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def captures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which `server` captures requests."""
    return tmp_path_factory.mktemp("captures")


@pytest.fixture(scope="module")
def server(captures: Path) -> Iterator[Server]:
    """chat is the first model and fim can fill in; tests that neither end an engine nor need keys share the server."""
    with several(capture_dir=captures, capture_prompts=True) as found:
        yield found


@pytest.fixture(scope="module")
def channel(server: Server) -> Iterator[grpc.Channel]:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as found:
        yield found


@pytest.mark.parametrize(
    ("name", "model"),
    [("chat", "chat"), ("GPT-4o:latest", "chat"), ("echo-1", "chat"), ("fim", "fim"), ("codestral", "fim"),
     ("book-2", "fim")],
)  # fmt: skip
def test_every_dialect_routes_by_name(server: Server, channel: grpc.Channel, name: str, model: str) -> None:
    prompt = BOOK[:12]
    written = {"chat": prompt, "fim": BOOK[12:24]}[model]
    found = server.ask(COMPLETIONS, model=name, prompt=prompt, max_tokens=12)
    assert found["model"] == model
    if model == "fim":
        assert found["choices"][0]["text"] == written
    assert server.ask("/completion", model=name, prompt=prompt, n_predict=12)["model"] == model
    result = server.ask("/api/generate", model=name, prompt=prompt, raw=True, stream=False)
    assert (result["model"], result["done"]) == (name, True)
    assert server.client.get("/props", params={"model": name}).json()["model_alias"] == model
    assert server.client.get(f"/v1/models/{name}").json()["root"] == ENGINES[model]["target"]
    answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text=prompt, model=name))
    assert answer.model == model


def test_an_own_name_precedes_the_name_of_another_models_target() -> None:
    engines = {"quick": {"target": "echo-1"}, "echo-1": {"target": "book-2"}}
    with several(engines) as server:
        for asked, model in (("echo-1", "echo-1"), ("quick", "quick"), ("book-2", "echo-1")):
            assert server.ask(COMPLETIONS, model=asked, prompt=BOOK[:12], max_tokens=2)["model"] == model


def test_fill_in_the_middle_is_routed_to_the_capable_model(server: Server, channel: grpc.Channel) -> None:
    segments = {"prefix": BEFORE, "suffix": AFTER}
    more: dict[str, Any] = {"max_tokens": 40, "temperature": 0}
    for path, body in (
        (COMPLETIONS, {"prompt": BEFORE, "suffix": AFTER, **more}),
        ("/beta/completions", {"prompt": BEFORE, "suffix": AFTER, **more}),
        ("/v1/fim/completions", {"prompt": BEFORE, "suffix": AFTER, **more}),
        ("/v1/completions", {"language": "python", "segments": segments}),
        ("/infill", {"input_prefix": BEFORE, "input_suffix": AFTER, "n_predict": 40}),
        ("/api/generate", {"prompt": BEFORE, "suffix": AFTER, "stream": False, "options": {"num_predict": 40}}),
    ):
        answer = server.ask(path, **body)
        assert LINE in json.dumps(answer), path
        assert answer.get("model", "fim") == "fim"
    gap = options_pb2.FimPrompt(prefix=BEFORE, suffix=AFTER)
    completion = completion_pb2_grpc.CompletionServiceStub(channel)
    messages = list(completion.Complete(completion_pb2.CompleteRequest(fim=gap)))
    assert messages[0].started.model == "fim"
    (ready,) = completion.CompleteSession(iter([completion_pb2.CompleteSessionRequest(setup={})]))
    assert (ready.ready.model, ready.ready.fills_in) == ("fim", True)
    answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(fim=gap))
    assert answer.model == "fim"
    assert server.refused("/v1/fim/completions", model="chat", prompt="a", suffix="b")[0] == 422


def test_a_call_without_a_model_is_routed_to_the_first(server: Server, channel: grpc.Channel) -> None:
    assert server.ask(COMPLETIONS, prompt="a")["model"] == "chat"
    assert server.ask(CHAT, messages=TALK)["model"] == "chat"
    assert server.ask("/api/chat", messages=TALK, stream=False)["model"] == "chat"
    models = model_pb2_grpc.ModelServiceStub(channel)
    assert models.GetServerInfo(model_pb2.GetServerInfoRequest()).target == "echo-1"
    assert models.GetServerInfo(model_pb2.GetServerInfoRequest(model="codestral")).target == "book-2"


FIM_FIRST = {"fim": ENGINES["fim"], "chat": ENGINES["chat"]}
PLAN = """\
name: widths
arms:
  narrow: {request: {speculation: {width: 1}}}
  wide: {request: {speculation: {width: 2}}}
assignment: {mode: hash}
"""


def test_experiments_are_per_model_and_key_limits_are_shared(tmp_path: Path) -> None:
    keys, folder, plan = tmp_path / "keys.yaml", tmp_path / "experiments", tmp_path / "plan.yaml"
    key_file = tmp_path / "key"
    key_file.write_text(make_key(keys, "boss", admin=True))
    plan.write_text(PLAN)
    one = {"Authorization": f"Bearer {make_key(keys, 'one', max_concurrent=1)}"}
    with several(FIM_FIRST, keys_file=keys, experiments={"folder": folder}) as server:
        address = ("--server", f"127.0.0.1:{server.grpc_port}", "--key-file", str(key_file))

        def ab(*words: str) -> str:
            result = CliRunner().invoke(cli, ["ab", *words, *address])
            assert result.exit_code == 0, result.output
            return result.stdout

        assert ab("start", str(plan), "--model", "chat").startswith("widths: running")
        assert (folder / "chat" / "widths").is_dir()
        assert ab("status") == "no experiments\n"
        server.client.headers.update(one)
        for model in ("fim", "chat"):
            server.ask(COMPLETIONS, model=model, prompt="a", max_tokens=1)
        assert server.comes_to(lambda: "narrow 1" in (result := ab("status", "--model", "chat")) or "wide 1" in result)
        assert ab("stop", "widths", "--model", "chat").startswith("widths: stopped")

        slow = {"model": "fim", "prompt": BOOK[:9], "max_tokens": 99, "cache_salt": "slow", "stream": True}
        with server.client.stream("POST", COMPLETIONS, json=slow) as response:
            lines = response.iter_lines()  # once it is gone, so is the stream
            next(lines)
            status, error = server.refused(COMPLETIONS, model="chat", prompt="a")
        assert (status, error["code"]) == (429, "rate_limited")
        assert server.comes_to(lambda: server.client.post(COMPLETIONS, json={"prompt": "a"}).status_code == 200)


def drain(server: Server, bearer: dict[str, str], model: str) -> int:
    request, metadata = admin_pb2.DrainRequest(model=model, timeout_s=5), tuple(bearer.items())
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        running: int = admin_pb2_grpc.AdminServiceStub(channel).Drain(request, metadata=metadata).running
        return running


@pytest.mark.parametrize("drained_first", [True, False])
def test_health_checks_fail_if_one_model_is_drained_and_the_other_dead(tmp_path: Path, drained_first: bool) -> None:
    file = tmp_path / "keys.yaml"
    bearer = {"authorization": f"Bearer {make_key(file, 'me', admin=True)}"}
    with running_serving(serving(make_several(keys_file=file), give_up_after=1)) as server:
        server.client.headers.update(bearer)
        engine = server.serving.models.first.client.engine
        assert engine.pid is not None
        if drained_first:
            assert drain(server, bearer, "fim") == 0
        os.kill(engine.pid, signal.SIGKILL)
        assert server.comes_to(lambda: engine.state == EngineState.FAILED)
        assert drained_first or drain(server, bearer, "fim") == 0
        assert server.comes_to(lambda: health_of(server, "") == SERVES_NOT)
        assert [state(server)[0], health_of(server, "chat"), health_of(server, "fim")] == [503, SERVES_NOT, SERVES_NOT]


def test_health_is_that_of_the_whole_server_while_it_loads(tmp_path: Path) -> None:
    file, loads = tmp_path / "keys.yaml", threading.Event()
    bearer = {"authorization": f"Bearer {make_key(file, 'me', admin=True)}"}
    config = make_several({**ENGINES, "last": {"target": EMBEDDER, "threads": 1}}, keys_file=file)

    def tokenizer(engine: EngineConfig) -> Any:
        assert engine.target != EMBEDDER or loads.wait(30)
        return FakeTokenizer()

    def make() -> Serving:
        return Serving(config, tokenizer, factory=SEVERAL, policy=quick_policy(give_up_after=1))

    with running_serving(make, wait=False) as server:
        chat, _, last = server.serving.models
        ready = asyncio.run_coroutine_threadsafe(server.serving.wait_ready(), server.loop)
        assert server.comes_to(lambda: last.client.engine.state == EngineState.READY)
        assert drain(server, bearer, "fim") == 0
        assert [health_of(server, name) for name in ("", "chat", "fim", "last")] == [
            SERVES_NOT, SERVES, SERVES_NOT, SERVES_NOT
        ]  # fmt: skip
        assert chat.client.engine.pid is not None
        os.kill(chat.client.engine.pid, signal.SIGKILL)
        assert server.comes_to(lambda: health_of(server, "chat") == SERVES_NOT)
        loads.set()
        ready.result(20)
        assert [health_of(server, name) for name in ("", "chat", "last")] == [SERVES, SERVES_NOT, SERVES]


def test_chat_is_routed_to_the_chat_model_and_one_model_drains_alone(tmp_path: Path) -> None:
    file = tmp_path / "keys.yaml"
    bearer = {"authorization": f"Bearer {make_key(file, 'me', admin=True)}"}
    with several(FIM_FIRST, keys_file=file) as server:
        server.client.headers.update(bearer)
        assert server.ask(CHAT, messages=TALK)["model"] == "chat"
        assert server.ask(COMPLETIONS, prompt="a")["model"] == "fim"
        health = server.client.get("/v1/health").json()
        assert (health["model"], health["chat_model"]) == ("fim", "chat")

        assert drain(server, bearer, "codestral") == 0
        assert [health_of(server, name) for name in ("", "chat", "fim")] == [SERVES, SERVES, SERVES_NOT]
        coder = server.serving.models.first.client
        assert coder.engine.pid is not None
        os.kill(coder.engine.pid, signal.SIGKILL)
        assert server.comes_to(lambda: (coder.engine.restarts, coder.engine.state) == (1, EngineState.READY))
        assert server.comes_to(lambda: health_of(server, "fim") == SERVES_NOT)
        status, error = server.refused(COMPLETIONS, model="fim", prompt="a")
        assert (status, error["code"]) == (503, "draining")
        assert server.ask(COMPLETIONS, model="chat", prompt="a")["model"] == "chat"
        assert [state(server)[0], state(server, model="fim")[0]] == [200, 503]
        assert drain(server, bearer, "chat") == 0
        assert state(server)[0] == 503
        assert [health_of(server, name) for name in ("", "chat", "fim")] == [SERVES_NOT] * 3


def test_an_unknown_name_is_rejected_with_the_known_names(server: Server, channel: grpc.Channel) -> None:
    status, error = server.refused(COMPLETIONS, model="gpt-5", prompt="a")
    assert (status, error["code"]) == (404, "model_not_found")
    assert error["message"].startswith("model 'gpt-5' is not served here; this server runs 'chat', 'fim'; ")
    response = server.client.post("/api/chat", json={"model": "llama3", "messages": TALK})
    assert (response.status_code, response.json()["error"][:17]) == (404, "model not found: ")
    assert server.client.get("/props", params={"model": "x"}).status_code == 404
    assert server.refused(COMPLETIONS, model=5, prompt="a")[0] == 400
    generation, models = generation_pb2_grpc.GenerationServiceStub(channel), model_pb2_grpc.ModelServiceStub(channel)
    for call, message in (
        (generation.Generate, pb.GenerateRequest(text="a", model="gpt-5")),
        (generation.Tokenize, pb.TokenizeRequest(text="a", model="gpt-5")),
        (models.GetTrace, model_pb2.GetTraceRequest(model="gpt-5")),
    ):
        with pytest.raises(grpc.RpcError) as caught:
            call(message)
        assert caught.value.code() == grpc.StatusCode.NOT_FOUND  # type: ignore[attr-defined]


def test_all_models_are_listed(server: Server, channel: grpc.Channel) -> None:
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"]) for card in cards] == [
        ("chat", "echo-1", None), ("gpt-4o", "echo-1", "chat"), ("fim", "book-2", None), ("codestral", "book-2", "fim")
    ]  # fmt: skip
    able = {card["id"]: card["capabilities"] for card in cards}
    assert [able["chat"][what] for what in ("completion_chat", "completion_fim")] == [True, False]
    assert [able["fim"][what] for what in ("completion_chat", "completion_fim")] == [False, True]
    entries = server.client.get("/api/tags").json()["models"]
    assert [entry["model"] for entry in entries] == ["chat", "gpt-4o", "fim", "codestral"]
    assert len({entry["digest"] for entry in entries}) == 2
    assert [entry["name"] for entry in server.client.get("/api/ps").json()["models"]] == ["chat", "fim"]
    found = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest()).models
    assert [model.name for model in found if model.role == model_pb2.MODEL_ROLE_TARGET] == ["chat", "fim"]


def test_token_counts_are_per_model(server: Server, channel: grpc.Channel) -> None:
    stub = generation_pb2_grpc.GenerationServiceStub(channel)
    ids = [list(stub.Tokenize(pb.TokenizeRequest(text="a", model=name)).token_ids) for name in ("", "chat", "fim")]
    assert ids == [[2, 97], [2, 97], [97]]
    assert server.ask("/tokenize", model="fim", content="a", add_special=True) == {"tokens": [97]}
    assert server.ask("/tokenize", content="a", add_special=True) == {"tokens": [2, 97]}


def state(server: Server, **query: str) -> tuple[int, str]:
    response = server.client.get("/readyz", params=query)
    return response.status_code, response.json()["engine"]


SERVES, SERVES_NOT = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


def health_of(server: Server, name: str) -> int:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        request = health_pb2.HealthCheckRequest(service=name)
        status: int = health_pb2_grpc.HealthStub(channel).Check(request).status
        return status


def test_a_crashed_engine_leaves_streams_of_other_models_running() -> None:
    with running_serving(serving(make_several(), give_up_after=2)) as server:
        chat, coder = (model.client for model in server.serving.models)

        def kill() -> None:
            assert coder.engine.pid is not None
            os.kill(coder.engine.pid, signal.SIGKILL)

        slow = {"model": "chat", "prompt": "x" * 16, "max_tokens": 16, "cache_salt": "slow", "stream": True}
        with server.client.stream("POST", COMPLETIONS, json=slow) as response:
            lines = response.iter_lines()
            next(lines)
            kill()
            rest = [line for line in lines if line]
        assert rest[-1] == "data: [DONE]"
        assert sum('"text":"x"' in line for line in rest) >= 14
        assert server.comes_to(lambda: (coder.engine.restarts, coder.engine.state) == (1, EngineState.READY))
        assert LINE in json.dumps(server.ask("/infill", input_prefix=BEFORE, input_suffix=AFTER))

        kill()  # for good
        assert server.comes_to(lambda: coder.engine.state == EngineState.FAILED)
        assert server.refused("/v1/fim/completions", prompt="a", suffix="b")[0] == 503
        assert server.refused(COMPLETIONS, model="fim", prompt="a")[0] == 503
        assert server.ask(COMPLETIONS, prompt="a")["model"] == "chat"
        assert [state(server)[0], state(server, model="chat")[0]] == [200, 200]
        assert state(server, model="fim") == (503, "failed")
        assert server.comes_to(lambda: health_of(server, "fim") == SERVES_NOT)
        assert [health_of(server, name) for name in ("", "chat")] == [SERVES, SERVES]
        assert (chat.engine.restarts, chat.engine.state) == (0, EngineState.READY)


@contextmanager
def live(server: Server) -> Iterator[None]:
    """While no model is loaded the server reports that it is alive but not ready."""
    for name in ("/livez", "/livez?model=fim", "/ping?model=other", "/version?model=fim"):
        assert server.client.get(name).status_code == 200
    assert server.client.get("/readyz").status_code == 503
    yield


def test_memory_is_divided_among_the_models() -> None:
    config = make_several({"chat": ENGINES["chat"], "fim": ENGINES["fim"] | {"kv_tokens": 1 << 33}})
    with running_serving(serving(config), wait=False) as server, live(server):
        with pytest.raises(EngineStartError, match=f"^fim: memory: .*lower engines.fim.kv_tokens from {1 << 33}"):
            server.run(server.serving.wait_ready())
        # A request that only an unloaded model may support is not rejected permanently by a loaded one.
        assert server.refused(COMPLETIONS, model="book-2", prompt="a")[0] == 503
        assert server.refused("/v1/fim/completions", prompt="a", suffix="b")[0] == 503
        assert server.refused("/v1/fim/completions", model="chat", prompt="a", suffix="b")[0] == 422


def test_the_page_can_choose_a_model(server: Server) -> None:
    for name, fills in (("chat", False), ("fim", True)):
        result = server.client.get("/page/info", params={"model": name}).json()
        assert (result["model"], result["models"], result["fills_in"]) == (name, ["chat", "fim"], fills)
        assert server.client.get("/trace", params={"model": name, "limit": 5}).status_code == 200
    assert server.client.get("/page/info").json()["model"] == "chat"
    for path in ("/page/info", "/trace"):
        assert server.client.get(path, params={"model": "x"}).status_code == 404


def test_the_client_and_the_command_address_a_model_by_name(server: Server) -> None:
    address = f"127.0.0.1:{server.grpc_port}"

    async def ask() -> None:
        async with Client(address) as client:
            assert (await client.info(model="fim")).target == "book-2"
            assert await client.tokenize("a", model="fim") == [97]
            assert (await client.generate("a", model="gpt-4o")).model == "chat"

    asyncio.run(ask())
    for name, target in (("codestral", "book-2"), ("", "echo-1")):
        args = ["generate", "--server", address, "--json", "--max-tokens", "3", *(["--model", name] if name else [])]
        result = CliRunner().invoke(cli, [*args, BOOK[:9]])
        assert (result.exit_code, json.loads(result.stdout)["model"]) == (0, target)
    assert "x: no such" in CliRunner().invoke(cli, ["generate", "--model", "x", "a"]).stderr


def test_metrics_and_logs_are_labelled_by_model(server: Server, caplog: pytest.LogCaptureFixture) -> None:
    def counted() -> dict[str, float]:
        return Scrape(server.client.get("/metrics").text).by_label("specdec_generation_tokens_total", "model")

    before = counted()
    with caplog.at_level(logging.INFO, LOGGER):
        server.ask(COMPLETIONS, model="codestral", prompt=BOOK[:12], max_tokens=7)
        assert server.comes_to(
            lambda: any(getattr(line, "fields", {}).get("model") == "fim" for line in caplog.records)
        )
    assert {name: value - before[name] for name, value in counted().items()} == {"chat": 0, "fim": 7}
    assert server.client.post(COMPLETIONS, json={"model": "unknown", "prompt": "a"}).status_code == 404
    found = Scrape(server.client.get("/metrics").text)
    assert found.by_label("specdec_engine_ready", "model") == {"chat": 1, "fim": 1}
    assert found.by_label("specdec_info", "target") == {"echo-1": 1, "book-2": 1}
    assert set(found.by_label("specdec_engine_process_resident_memory_bytes", "model")) == {"chat", "fim"}
    assert found.value("specdec_calls_total", endpoint=COMPLETIONS, status="404") >= 1
    assert found.text.count("# TYPE specdec_requests_total ") == 1


def test_captured_requests_are_replayed_on_the_same_model(server: Server, captures: Path, tmp_path: Path) -> None:
    began_s, prompt = time.time(), list(BOOK[:9].encode())
    for name in ("chat", "codestral"):
        server.ask(COMPLETIONS, model=name, prompt=prompt, max_tokens=3)

    def since(began_s: float) -> list[dict[str, Any]]:
        return [line for line in captured_lines(captures) if line["offset_s"] >= began_s]

    assert server.comes_to(lambda: len(since(began_s)) == 2)
    lines = since(began_s)
    assert [line["model"] for line in lines] == ["chat", "fim"]
    trace = tmp_path / "trace.jsonl"
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    for url in (f"grpc://127.0.0.1:{server.grpc_port}", f"{server.url}/v1"):
        began_s = time.time()
        words = ("replay", str(trace), "--url", url, "--quiet", "--warm-up", "0", "--max-slip", "100000")
        done = CliRunner().invoke(cli, words)
        assert done.exit_code == 0, done.output
        assert sorted(line["model"] for line in since(began_s)) == ["chat", "fim"]


NAMED = [
    ("/tokenize", {"content": "abc"}, "chat"), ("/tokenize", {"prompt": "abc"}, "chat"),
    ("/detokenize", {"tokens": [65]}, "chat"), ("/apply-template", {"messages": TALK}, "chat"),
    ("/v1/completions", {"prompt": "a"}, "chat"), ("/v1/completions", {"segments": {"prefix": "a"}}, "fim"),
    ("/v1/events", {"type": "view", "completion_id": "x"}, "chat"),
]  # fmt: skip


@pytest.mark.parametrize("strict_fields", [False, True])
def test_every_call_may_name_its_model(strict_fields: bool) -> None:
    with several(strict_fields=strict_fields) as server:
        for path, body, model in NAMED:
            assert server.client.post(path, json=body | {"model": model}).status_code == 200, (path, body)
            if path != "/v1/events":
                assert server.client.post(path, json=body | {"model": "nope"}).status_code == 404, (path, body)
