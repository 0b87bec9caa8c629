"""What the health endpoint reports to Tabby's clients."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from typing import Any

import pytest

from server.http.call import Call
from server.http.tabby import health
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import Fim, make_context, receiving


def health_of(kernels: str = "native", has_chat: bool = True, pooling: str = "") -> dict[str, Any]:
    """The answer of a server whose engine runs on ``kernels``. pooling: of its model; empty: it generates."""
    server: Any = make_context(FakeTokenizer(has_chat=has_chat), fim=Fim())
    model = server.models.first
    model.client.info = dataclasses.replace(model.info, kernels=kernels, pooling=pooling)
    sent: list[bytes] = []

    async def send(message: Any) -> None:
        sent.append(message.get("body", b""))

    scope = {"headers": [], "query_string": b""}
    asyncio.run(health(Call(scope, receiving(), send, server)))
    found: dict[str, Any] = json.loads(b"".join(sent))
    return found


@pytest.mark.parametrize(("kernels", "device"), [("native", "cpu"), ("reference", "cpu"), ("triton", "cuda")])
def test_the_device_is_the_models_device(kernels: str, device: str) -> None:
    found = health_of(kernels)
    assert found["device"] == device
    assert {kind: model["local"]["device"] for kind, model in found["models"].items()} == {
        "completion": device, "chat": device,
    }  # fmt: skip


def test_a_model_without_chat_offers_no_chat() -> None:
    found = health_of(has_chat=False)
    assert list(found["models"]) == ["completion"]
    assert "chat_model" not in found


@pytest.mark.parametrize("pooling", ["last", "rank"])
def test_a_model_that_does_not_generate_offers_nothing(pooling: str) -> None:
    found = health_of(pooling=pooling)
    assert found["models"] == {}
    assert not {"model", "chat_model"} & found.keys()
