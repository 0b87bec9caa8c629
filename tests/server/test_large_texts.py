"""Large texts block no other request: texts that fit no prompt are not encoded, and the rest wait for a thread."""

from __future__ import annotations

import asyncio
import json
import os
import re
import threading
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import grpc
import httpx
import pytest

from server.async_tokenizer import (
    LARGE_CHARACTERS,
    MOST_CHARACTERS,
    AsyncTokenizer,
    TextTooLongError,
    text_length,
)
from server.http import call as http_call
from server.http.call import Call
from server.json_body import parsing_costs
from specdec.api.v1 import generation_pb2 as pb
from specdec.api.v1 import generation_pb2_grpc, options_pb2
from specdec.core.fields import MAX_PROMPT_TOKENS
from specdec.errors import InvalidRequestError, QueueFullError
from tests.server.auth.key_files import make_key
from tests.server.fake_tokenizer import FakeTokenizer
from tests.server.http.calls import ignored, make_call, make_context, receiving
from tests.server.http.harness import CHAT, COMPLETIONS, Server, running

LARGE = "x" * (LARGE_CHARACTERS + 1)


class Watched(FakeTokenizer):
    """Remembers the longest text that it was given to encode, and may claim to have long tokens."""

    def __init__(self) -> None:
        super().__init__(has_tools=True)
        self.longest_text = 0

    def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        self.longest_text = max(self.longest_text, len(text))
        return super().encode(text, add_special=add_special, parse_special=parse_special)

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        self.longest_text = max(self.longest_text, text_length(messages))
        return super().encode_chat(messages, **options)


def post(server: Server, path: str, body: dict[str, Any], **headers: str) -> httpx.Response:
    return server.client.post(path, json=body, headers=headers)


def test_a_text_that_fits_no_prompt_is_rejected_before_encoding() -> None:
    watched = Watched()
    with running(lambda: watched) as server:
        watched.longest_text = 0  # the server made one large text ready
        chat = {"messages": [{"role": "user", "content": [{"type": "text", "text": LARGE}]}]}
        for path, body in ((COMPLETIONS, {"prompt": LARGE}), (CHAT, chat), ("/tokenize", {"content": LARGE})):
            response = post(server, path, body)
            assert response.status_code == 400
            assert re.search(r"at least 163\d\d tokens, the limit is 127", response.text)
        assert watched.longest_text < LARGE_CHARACTERS
        watched.longest_token = 1000  # it might fit now
        message = post(server, COMPLETIONS, {"prompt": LARGE}).json()["error"]["message"]
        assert "prompt has 16386 tokens" in message
        assert watched.longest_text == len(LARGE)


def test_a_prediction_that_fits_no_answer_is_named() -> None:
    prediction = {"type": "content", "content": LARGE}
    with running(Watched) as server, grpc.insecure_channel(f"127.0.0.1:{server.grpc_port}") as channel:
        for path, body in ((COMPLETIONS, {"prompt": "a"}), (CHAT, {"messages": [{"role": "user", "content": "a"}]})):
            error = post(server, path, {**body, "prediction": prediction}).json()["error"]
            assert (error["param"], error["code"]) == ("prediction", "invalid_argument")
            assert "has at least 16385 tokens, an answer at most 127" in error["message"]
        message = pb.GenerateRequest(text="a", prediction=options_pb2.PredictionOptions(text=LARGE))
        with pytest.raises(grpc.RpcError, match="prediction: has at least 16385 tokens"):
            generation_pb2_grpc.GenerationServiceStub(channel).Generate(message)


def test_a_rate_limited_key_has_no_large_text_encoded(tmp_path: Path) -> None:
    keys, watched = tmp_path / "keys.yaml", Watched()
    watched.longest_token = 1000
    key = make_key(keys, "a", requests_per_minute=1)
    with running(lambda: watched, keys_file=keys) as server:
        watched.longest_text = 0
        answers = [post(server, COMPLETIONS, {"prompt": "a", "max_tokens": 1}, authorization=f"Bearer {key}")]
        answers += [post(server, COMPLETIONS, {"prompt": LARGE}, authorization=f"Bearer {key}")]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert post(server, COMPLETIONS, {"prompt": LARGE}).status_code == 401
        assert watched.longest_text == 1


def large_texts() -> AsyncTokenizer:
    """One for which no text is too long."""
    info: Any = SimpleNamespace(max_context=2)
    tokenizer = AsyncTokenizer(lambda: info, Mock())
    tokenizer.load(Mock(longest_token=MOST_CHARACTERS))
    return tokenizer


async def test_one_text_is_encoded_at_a_time_and_the_queue_is_short() -> None:
    texts, begun, go_on = large_texts(), list[int](), threading.Event()

    def encode(number: int) -> list[int]:
        begun.append(number)
        assert go_on.wait(20)
        return [number]

    size = MOST_CHARACTERS // 8
    waiting = [asyncio.create_task(texts._encode_in_thread(size, partial(encode, number))) for number in range(8)]
    while not begun:
        await asyncio.sleep(0.001)
    with pytest.raises(QueueFullError, match=f"{MOST_CHARACTERS} characters of large texts") as refused:
        await texts._encode_in_thread(len(LARGE), lambda: encode(99))
    assert (refused.value.reason, refused.value.http_status, refused.value.retry_after_s) == ("QUEUE_FULL", 429, 30.0)
    waiting[3].cancel()
    await asyncio.wait([waiting[3]])
    go_on.set()
    assert await asyncio.gather(*waiting, texts._encode_in_thread(size, lambda: encode(9)), return_exceptions=True)
    assert begun == [0, 1, 2, 4, 5, 6, 7, 9]  # no text waits for one whose client left
    texts.close()


async def test_the_thread_only_lowers_its_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    lowered: list[int] = []
    monkeypatch.setattr(os, "setpriority", lambda *_: None)  # might raise that of a niced server, which fails
    monkeypatch.setattr(os, "nice", lowered.append)
    texts = large_texts()
    await texts._encode_in_thread(len(LARGE), list)
    texts.close()
    assert lowered == [10]


async def test_lengths() -> None:
    assert text_length([{"a": ["bc", 1, None]}, "def", [[("g",)]]]) == 6

    async def encode(characters: int, longest_token: int, max_context: int) -> None:
        info: Any = SimpleNamespace(max_context=max_context)
        tokenizer = AsyncTokenizer(lambda: info, Mock())
        tokenizer.load(Mock(longest_token=longest_token))
        await tokenizer.encode("x" * characters)
        tokenizer.close()

    await encode(LARGE_CHARACTERS, 1, 2)
    await encode(LARGE_CHARACTERS * 4, 64, 1025)
    with pytest.raises(TextTooLongError, match="at least 1025 tokens, the limit is 1024") as refused:
        await encode(LARGE_CHARACTERS * 4 + 1, 64, 1025)
    assert (refused.value.limit, refused.value.got) == (1024, 1025)


@pytest.mark.parametrize("item", [b"1,", b"[],", b"{},", b'"",', b"[[[[[[[[1]]]]]]]],"])
def test_a_body_of_millions_of_values_is_rejected_unparsed(item: bytes) -> None:
    server = make_context(limit=16 << 20)
    few, many = (
        make_call(b'{"a":[' + item * count + b"0]}", server=server) for count in (10_000, (15 << 20) // len(item))
    )
    long = make_call(b'{"a":"' + b"x" * (8 << 20) + b'"}', server=server)
    for call in (few, long):
        asyncio.run(call.read())
    assert (len(few.data["a"]), len(long.data["a"])) == (10_001, 8 << 20)
    with pytest.raises(InvalidRequestError, match="body: has too many values"):
        asyncio.run(many.read())


def test_the_longest_prompt_of_ids_and_any_long_text_are_parsed() -> None:
    ids = call_with(b'{"prompt":[' + b"123456," * (MAX_PROMPT_TOKENS - 1) + b'1],"stop":["a"]}')
    assert len(ids.data["prompt"]) == MAX_PROMPT_TOKENS
    text = r'{"a": [1], "b": "x\\", :: , [\n]' * 100_000
    assert call_with(json.dumps({"prompt": text}).encode()).data["prompt"] == text


def test_a_large_body_that_is_not_json_is_refused_when_it_has_come() -> None:
    with pytest.raises(InvalidRequestError, match="is not JSON"):
        call_with(b'{"a":[' + b"1," * 500_000 + b"1}")


def test_a_large_body_in_many_pieces_holds_up_no_other_large_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_call, "LARGE_BYTES", 1000)
    counted = list[bytes]()
    monkeypatch.setattr(
        http_call, "parsing_costs", lambda pieces: parsing_costs(counted.append(p) or p for p in pieces)
    )
    body = b'{"a":[' + b"1," * 1000 + b"1]}"
    messages = [{"type": "http.request", "body": body[at : at + 1], "more_body": True} for at in range(len(body))]
    call = Call({"headers": []}, receiving(*messages, {"type": "http.request"}), ignored, make_context(limit=16 << 20))
    asyncio.run(call.read())
    assert (counted, len(call.data["a"])) == ([body], 1001)


def call_with(body: bytes) -> Call:
    """A call whose body has been read."""
    call = make_call(body, server=make_context(limit=16 << 20))
    asyncio.run(call.read())
    return call


@pytest.mark.parametrize("size", [1, 2, 3, 5, 64])
def test_only_structure_outside_of_strings_counts(size: int) -> None:
    data = rb'{"a":["\\","\\\",[{:",7,8,{"\"":"\\\\"}]}'
    *_, cost = parsing_costs(data[at : at + size] for at in range(0, len(data), size))
    assert cost == 4 * 1 + 2 * 8 + 1 * 16 + 2 * 8 + 10 * 2


def test_a_body_of_a_hundred_thousand_names_is_rejected_unparsed() -> None:
    """The parser takes three times as long for a name as for another value."""
    names = b",".join(b'"%d":1' % number for number in range(100_000))
    with pytest.raises(InvalidRequestError, match="body: has too many values"):
        call_with(b'{"logit_bias":{' + names + b"}}")
