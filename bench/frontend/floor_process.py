"""Serves with the front end's libraries alone: ``python -m bench.frontend.floor_process STEP_MS``.

grpc.aio and uvicorn run in one uvloop, as in the front end, without engine, checks and admission. They answer the
benchmark's requests with messages of the same form, whose stamps are taken when the library gets them. The process
prints its ports and ends with its parent, as `bench.local_server`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any

import grpc
import orjson
import uvicorn
import uvloop

from bench.frontend.paced_engine import TOKENS, now_ns, stamp
from bench.local_server import end_with_parent
from server.http.http_server import listen
from specdec.api.v1 import generation_pb2 as pb

_SERVICE, _METHOD = "specdec.api.v1.GenerationService", "GenerateStream"
Send = Callable[[dict[str, Any]], Awaitable[None]]
Receive = Callable[[], Awaitable[dict[str, Any]]]


class Floor:
    """Answers over gRPC and HTTP, with ``step_s`` seconds between messages."""

    def __init__(self, step_s: float) -> None:
        self._step_s = step_s

    async def _texts(self, max_tokens: int) -> AsyncIterator[str]:
        now = now_ns()
        yield stamp(now, now)
        for _ in range(-(-max_tokens // TOKENS) - 1):
            await asyncio.sleep(self._step_s)
            yield stamp(now_ns())

    async def stream(self, data: bytes, context: grpc.aio.ServicerContext) -> AsyncIterator[bytes]:
        """GenerateStream."""
        request = pb.GenerateStreamRequest.FromString(data)
        yield pb.GenerateStreamResponse(started=pb.Started(prompt_tokens=1)).SerializeToString()
        async for text in self._texts(request.stopping.max_tokens):
            yield pb.GenerateStreamResponse(delta=pb.Delta(text=text)).SerializeToString()
        yield pb.GenerateStreamResponse(finished=pb.Finished()).SerializeToString()

    async def app(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        """POST /v1/completions."""
        body, more = b"", True
        while more:
            part = await receive()
            body, more = body + part["body"], part["more_body"]
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        async for text in self._texts(orjson.loads(body)["max_tokens"]):
            line = b"data: " + orjson.dumps({"choices": [{"index": 0, "text": text}]}) + b"\n\n"
            await send({"type": "http.response.body", "body": line, "more_body": True})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})


async def serve(floor: Floor) -> None:
    """Serve until the process ends."""
    handler: grpc.RpcMethodHandler[bytes, bytes] = grpc.unary_stream_rpc_method_handler(floor.stream)
    server = grpc.aio.server()
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, {_METHOD: handler}),))
    grpc_port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    sockets = await listen("127.0.0.1", 0)
    config = uvicorn.Config(
        floor.app, interface="asgi3", http="h11", ws="none", lifespan="off", log_config=None, access_log=False,
        proxy_headers=False, server_header=False, date_header=False,
    )  # fmt: skip
    http = uvicorn.Server(config)
    serving = asyncio.create_task(http.serve(sockets=sockets))
    while not (http.started or serving.done()):
        await asyncio.sleep(0.01)
    print(json.dumps({"grpc_port": grpc_port, "http_port": sockets[0].getsockname()[1]}), flush=True)
    await serving


def main(argv: Sequence[str]) -> None:
    """Serve; ``argv`` holds the milliseconds between messages."""
    end_with_parent()
    uvloop.run(serve(Floor(float(argv[0]) / 1e3)))


if __name__ == "__main__":
    main(sys.argv[1:])
