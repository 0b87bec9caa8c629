"""The fields of Ollama's bodies that are described are those that are read."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import pytest

from server.http.call import Call
from server.http.ollama import (
    CHAT_FIELDS,
    GENERATE_FIELDS,
    OPTION_FIELDS,
    parse_chat,
    parse_generate,
    read_options,
)
from server.json_body import Body
from specdec.errors import ViolationCollector
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import make_call
from tests.server.http.test_openapi import Watched

HI = [{"role": "user", "content": "hi"}]


@pytest.mark.parametrize(
    ("reader", "body", "fields"),
    [(parse_generate, {"prompt": "hi"}, GENERATE_FIELDS), (parse_chat, {"messages": HI}, CHAT_FIELDS)],
)
def test_bodies(reader: Callable[[Call], Awaitable[Any]], body: dict[str, Any], fields: Mapping[str, Any]) -> None:
    async def read() -> set[str]:
        call = make_call(json.dumps(body).encode())
        await call.read()
        call.data = watched = Watched(call.data)
        await reader(call)
        return watched.seen

    assert asyncio.run(read()) == set(fields)


def test_options() -> None:
    options = Watched({})
    read_options(Body({"options": options}, ViolationCollector()), FakeTokenizer())
    assert options.seen == set(OPTION_FIELDS)
