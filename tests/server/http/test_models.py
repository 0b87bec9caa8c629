"""The names that address a model, and the lists that report them."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

import grpc
import pytest

from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc, model_pb2, model_pb2_grpc
from specdec.config import EngineConfig
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import Fim
from tests.server.http.harness import CHAT, COMPLETIONS, Server, running

CAPABILITIES = {
    "completion_chat": True, "completion_fim": True, "function_calling": True, "fine_tuning": False, "vision": False,
    "classification": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    """Its model is called gpt-4o and Org/Coder:7b, too."""
    engine = EngineConfig(target="fake", aliases=("gpt-4o", "Org/Coder:7b"))
    with running(lambda: FakeTokenizer(has_tools=True), fim=Fim(), engine=engine) as found:
        yield found


@pytest.mark.parametrize("name", ["gpt-4o", "GPT-4o:latest", "Org/Coder:7b", "fake"])
def test_every_dialect_accepts_every_name(server: Server, name: str) -> None:
    message = {"role": "user", "content": "a"}
    assert server.ask(COMPLETIONS, model=name, prompt="a")["model"] == "fake"
    assert server.ask(CHAT, model=name, messages=[message])["model"] == "fake"
    assert server.ask("/v1/fim/completions", model=name, prompt="a", suffix="b")["model"] == "fake"
    assert server.ask("/api/chat", model=name, messages=[message], stream=False)["model"] == name
    assert server.ask("/completion", model=name, prompt="a")["model"] == "fake"
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        answer = generation_pb2_grpc.GenerationServiceStub(channel).Generate(pb.GenerateRequest(text="a", model=name))
    assert answer.model == "fake"


ALIAS = "; ask for that, or start the server with `--alias NAME` to serve it by another name too"


@pytest.mark.parametrize("name", ["gpt-4", "coder:7b", "gpt-4o:7b"])
def test_other_names_are_rejected(server: Server, name: str) -> None:
    status, error = server.refused(COMPLETIONS, model=name, prompt="a")
    assert (status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == f"model {name!r} is not served here; this server runs 'fake'{ALIAS}"


def test_openai_list(server: Server) -> None:
    cards = server.client.get("/v1/models").json()["data"]
    assert [(card["id"], card["root"], card["parent"], card["aliases"]) for card in cards] == [
        ("fake", "fake", None, ["gpt-4o", "Org/Coder:7b"]), ("gpt-4o", "fake", "fake", []),
        ("Org/Coder:7b", "fake", "fake", []),
    ]  # fmt: skip
    assert all(card["capabilities"] == CAPABILITIES for card in cards)
    for card in cards:
        assert server.client.get(f"/v1/models/{card['id']}").json() == card


def test_bug_anthropics_clients_get_its_cards(server: Server) -> None:
    headers = {"anthropic-version": "2023-06-01"}
    found = server.client.get("/v1/models", headers=headers).json()
    assert [(card["type"], card["id"], card["display_name"]) for card in found["data"]] == [
        ("model", name, name) for name in ("fake", "gpt-4o", "Org/Coder:7b")
    ]
    assert (found["has_more"], found["first_id"], found["last_id"]) == (False, "fake", "Org/Coder:7b")
    assert all(datetime.fromisoformat(card["created_at"]).tzinfo for card in found["data"])
    assert server.client.get("/v1/models/gpt-4o", headers=headers).json() == found["data"][1]


def test_ollama_list(server: Server) -> None:
    entries = server.client.get("/api/tags").json()["models"]
    assert [entry["model"] for entry in entries] == [entry["name"] for entry in entries]
    assert [entry["name"] for entry in entries] == ["fake", "gpt-4o", "Org/Coder:7b"]
    assert len({entry["digest"] for entry in entries}) == 1
    assert [entry["name"] for entry in server.client.get("/api/ps").json()["models"]] == ["fake"]
    assert server.ask("/api/show", model="gpt-4o")["model_info"]["general.basename"] == "fake"


def test_grpc_list(server: Server) -> None:
    with grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        found = model_pb2_grpc.ModelServiceStub(channel).ListModels(model_pb2.ListModelsRequest())
    assert [(model.name, list(model.aliases)) for model in found.models] == [
        ("fake", ["gpt-4o", "Org/Coder:7b"]), ("fake-draft", []),
    ]  # fmt: skip
