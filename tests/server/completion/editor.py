"""A server over the book engine, and an editor that talks to it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import grpc

from server.serving import Serving
from specdec.api.v1 import completion_pb2 as pb
from specdec.api.v1 import completion_pb2_grpc, generation_pb2_grpc, model_pb2, model_pb2_grpc, options_pb2
from tests.fake_engine import BOOK, BOOKS
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.harness import make_config, quick_policy

AT = BOOK.index("total = add")
BEHIND = BOOK.index("    return total / len")
LINE = "total = add(total, value)"
TEXT = pb.DocumentText(uri="a.py", version=1, text=BOOK[:AT] + "\n" + BOOK[BEHIND:], language="python")


def fim(at: int = AT, behind: int = BEHIND, **fields: object) -> options_pb2.FimPrompt:
    """The book without the requested line."""
    return options_pb2.FimPrompt(prefix=BOOK[:at], suffix="\n" + BOOK[behind:], **fields)  # type: ignore[arg-type]


class Server:
    """Stubs on a running server."""

    def __init__(self, serving: Serving, channel: grpc.aio.Channel) -> None:
        self.serving = serving
        self.completion = completion_pb2_grpc.CompletionServiceStub(channel)
        self.generation = generation_pb2_grpc.GenerationServiceStub(channel)
        self.models = model_pb2_grpc.ModelServiceStub(channel)

    async def idle(self, *, submitted: int | None = None, aborted: int | None = None) -> bool:
        """Whether the engine comes to rest, having been given and having dropped so many requests."""
        for _ in range(150):
            load = await self.models.GetLoad(model_pb2.GetLoadRequest())
            quiet = load.running_requests == 0 and self.serving.client.in_flight == 0
            quiet = quiet and load.free_pages == load.total_pages  # as of the engine's last heartbeat
            if quiet and submitted in (None, load.prompt_tokens) and aborted in (None, load.prefix_hit_tokens):
                return True
            await asyncio.sleep(0.02)
        return False


class Editor:
    """One CompleteSession stream."""

    def __init__(self, server: Server, key: str = "") -> None:
        self.call = server.completion.CompleteSession(metadata=[("x-api-key", key)])
        self.asks = 0

    async def send(self, **fields: Any) -> None:
        await self.call.write(pb.CompleteSessionRequest(**fields))

    async def set_up(self, **fields: Any) -> pb.SessionReady:
        await self.send(setup=pb.SessionSetup(**fields))
        return (await self.read()).ready

    async def ask(self, **fields: Any) -> int:
        """Request a completion; at an offset of the document "a.py" when ``offset`` and ``version`` are given."""
        self.asks += 1
        if "offset" in fields:
            place = pb.Cursor(uri="a.py", offset=fields.pop("offset"), version=fields.pop("version", 1))
            fields["ask"] = pb.CompletionAsk(id=self.asks, cursor=place)
        await self.send(**fields)
        return fields["ask"].id

    async def read(self) -> pb.CompleteSessionResponse:
        message = await asyncio.wait_for(self.call.read(), 20)
        assert isinstance(message, pb.CompleteSessionResponse), "the stream has ended"
        return message

    async def answer(self, ask_id: int) -> tuple[pb.SuggestionStarted, str, pb.SuggestionFinished]:
        """Return the complete answer to a request; no other message may arrive in between."""
        started, text = None, ""
        while True:
            message = await self.read()
            which = message.WhichOneof("event")
            assert which in ("started", "delta", "finished"), message
            assert getattr(message, which).ask_id == ask_id
            if which == "started":
                started = message.started
            elif which == "delta":
                text += message.delta.text
            else:
                return started, text, message.finished


@asynccontextmanager
async def running(tokenizer: Callable[[], Any] = CodeTokenizer, **server: Any) -> AsyncIterator[Server]:
    """A server that is ready. server: values of `ServerConfig`."""
    serving = Serving(make_config(**server), lambda _: tokenizer(), factory=BOOKS, policy=quick_policy())
    addresses = await serving.start()
    try:
        await serving.wait_ready()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{addresses.grpc_port}") as channel:
            yield Server(serving, channel)
    finally:
        await serving.stop()


async def failed(call: grpc.aio.Call) -> grpc.aio.AioRpcError:
    """Return the error with which the call ends."""
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call did not fail")
