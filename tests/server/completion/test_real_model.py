"""A real model on a real port: a continued suggestion of a session equals a fresh request."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest

from server.completion.documents import FillMode, Gap
from server.completion.prompt_packer import PromptPacker
from server.completion.requests import CompletionOptions
from server.serving import Serving
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import options_pb2
from specdec.config import Config, EngineConfig, ServerConfig
from specdec.models.resolve import load_tokenizer
from tests.server.completion.editor import Editor, Server

pytestmark = pytest.mark.model
ABOVE = '''\
colours = ["red", "green", "blue"]
numbers = ["one", "two", "three"]


def show(words):
    """Print every word."""
    for word in words:
        print(word)


show(colours)
'''
PLAIN = pb.CompletionOptions(
    mode=pb.CompletionOptions.MODE_MIDDLE_OR_PREFIX, stop_at_dedent=False, stop_at_bracket=False, stop_at_suffix=False
)


@asynccontextmanager
async def serving(config: EngineConfig, tokenizer: Any) -> AsyncIterator[Server]:
    found = Serving(Config(engine=config, server=ServerConfig(grpc_port=0, http_port=None)), lambda _: tokenizer)
    addresses = await found.start()
    try:
        await found.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
            yield Server(found, channel)
    finally:
        await found.stop()


async def fresh(server: Server, prefix: str, max_tokens: int) -> tuple[str, list[int]]:
    """Text and ids of a request without any session."""
    request = pb.CompleteRequest(
        fim=options_pb2.FimPrompt(prefix=prefix), completion=PLAIN,
        stopping=options_pb2.StoppingOptions(max_tokens=max_tokens),
    )  # fmt: skip
    messages = [message async for message in server.completion.Complete(request)]
    return "".join(m.delta.text for m in messages), [i for m in messages for i in m.delta.token_ids]


async def test_a_continued_suggestion_equals_a_fresh_request() -> None:
    """Holds at every character, also within a token, as long as the tokenizer turns the typed text into the generated
    tokens: a fresh request starts with the session's answer and extends it past the limit."""
    config = EngineConfig(kv_tokens=4096, max_context=1024)
    tokenizer = load_tokenizer(config.target, config.cache_dir)
    packer, options = PromptPacker(tokenizer, 1024), CompletionOptions()

    def packed(prefix: str) -> tuple[list[int], str]:
        budget = packer.budget(None, options.base.stopping.max_tokens or 0)
        found = packer.pack(Gap(prefix), FillMode.MIDDLE_OR_PREFIX, budget)
        return list(found.ids), found.healing_prefix

    def begins(ids: list[int], generated: list[int], prompt: list[int]) -> bool:
        """Return whether ``ids`` are the prompt and the first generated tokens."""
        return ids == [*prompt, *generated][: len(ids)] and len(ids) >= len(prompt)

    prefix = ABOVE + "sho"
    async with serving(config, tokenizer) as server:
        text, generated = await fresh(server, prefix, 24)
        assert len(text) > 20
        editor = Editor(server)
        await editor.set_up(completion=PLAIN, stopping=options_pb2.StoppingOptions(max_tokens=24))
        ask = await editor.ask(ask=pb.CompletionAsk(id=1, fim=options_pb2.FimPrompt(prefix=prefix)))
        _, suggested, _ = await editor.answer(ask)
        assert suggested == text
        prompt, _ = packed(prefix)
        places = range(1, len(text) - 4)
        agreed = [typed for typed in places if begins(packed(prefix + text[:typed])[0], generated, prompt)]
        assert len(agreed) >= 0.8 * len(places)
        for typed in places:
            place = options_pb2.FimPrompt(prefix=prefix + text[:typed])
            ask = await editor.ask(ask=pb.CompletionAsk(id=typed + 1, fim=place))
            started, rest, _ = await editor.answer(ask)
            assert started.origin == pb.SuggestionStarted.ORIGIN_CONTINUED
            assert rest == text[typed:]
            if typed in agreed and typed % 4 == 1:  # in the middle of words too
                anew, ids = await fresh(server, prefix + text[:typed], 24)
                # The limit leaves room for the word's respelling, which takes a token more for some than for others.
                assert anew.startswith(rest) or (rest.startswith(anew) and len(generated) - len(ids) <= 1)
        draft = await editor.ask(
            ask=pb.CompletionAsk(id=99, fim=options_pb2.FimPrompt(prefix=prefix + "colours)  # x\n" + "show("))
        )
        assert (await editor.answer(draft))[0].origin == pb.SuggestionStarted.ORIGIN_NEW
        assert await server.idle()  # and no page is lost
