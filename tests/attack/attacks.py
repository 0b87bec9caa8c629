"""The attacks: what one caller sends to harm others. Each returns when its calls are answered or rejected.

An unexpected answer is an AssertionError.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import httpx

from specdec.api.v1 import admin_pb2, generation_pb2

REPEATS = 3
MIB = 1 << 20
Attack = Callable[["Target"], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Many:
    """A list of ``count`` equal items."""

    count: int
    item: Any = 7


class Target:
    """The attacked server, an operator's key to it, and a folder for files."""

    def __init__(self, grpc_port: int, http_port: int, key: str, folder: Path) -> None:
        self.grpc_port, self.http_port, self.folder = grpc_port, http_port, folder
        self.bearer = f"Bearer {key}"

    async def call(self, method: str, data: bytes) -> grpc.StatusCode:
        """Make a call of one message, and return its code."""

        async def messages() -> Any:
            yield data

        async with grpc.aio.insecure_channel(f"127.0.0.1:{self.grpc_port}") as channel:
            call: Any = channel.stream_stream(f"/specdec.api.v1.{method}")(
                messages(), timeout=60, metadata=[("authorization", self.bearer)]
            )
            try:
                async for _ in call:
                    pass
            except grpc.aio.AioRpcError as error:
                return error.code()
        return grpc.StatusCode.OK

    async def post(self, path: str, body: Any, timeout_s: float = 60) -> int:
        """Post JSON, and return the status."""
        content = await asyncio.to_thread(lambda: json.dumps(body).encode())
        headers = {"authorization": self.bearer, "content-type": "application/json"}
        async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{self.http_port}", timeout=timeout_s) as http:
            return (await http.post(path, content=content, headers=headers)).status_code


def lists(**fields: Any) -> Attack:
    """Lists of GenerateRequest that are refused: by field, a number of items, or a group of such fields."""

    def message() -> bytes:
        request = generation_pb2.GenerateRequest(text="a")
        request.MergeFrom(generation_pb2.GenerateRequest(**_grown(fields)))
        return request.SerializeToString()

    async def attack(target: Target) -> None:
        data = await asyncio.to_thread(message)
        for _ in range(REPEATS):
            code = await target.call("GenerationService/Generate", data)
            assert code == grpc.StatusCode.INVALID_ARGUMENT, code

    return attack


def _grown(fields: Any) -> Any:
    """``fields`` with each `Many` as a list of its length."""
    if isinstance(fields, Many):
        return [fields.item] * fields.count
    return {name: _grown(field) for name, field in fields.items()} if isinstance(fields, dict) else fields


async def longest_lists(target: Target) -> None:
    """Every list of a request as long as it may be."""
    request = generation_pb2.GenerateRequest(
        text="a b c", sampling={"n": 8, "seed": 1, "allowed_token_ids": range(49_000)},
        stopping={"max_tokens": 16, "stop_token_ids": range(1024)},
        prediction={"token_ids": {"ids": [7] * (1 << 17)}},
    )  # fmt: skip
    request.sampling.logit_bias.update(dict.fromkeys(range(4096), 0.5))
    for _ in range(REPEATS):
        assert await target.call("GenerationService/Generate", request.SerializeToString()) == grpc.StatusCode.OK


async def grammar_bombs(target: Target) -> None:
    """Grammars with rules that double, from four clients concurrently."""
    levels = 15

    async def one(client: int) -> None:
        rules = "\n".join(f"r{i}c{client}: r{i + 1}c{client} r{i + 1}c{client}" for i in range(levels))
        text = f'start: r0c{client}\n{rules}\nr{levels}c{client}: "a"\n'
        for number in range(REPEATS):
            body = {"prompt": "a", "max_tokens": 4, "guided_grammar": f"// {number}\n{text}"}
            await target.post("/v1/completions", body)

    await asyncio.gather(*map(one, range(4)))


async def schemas(target: Target) -> None:
    """Numbers that are costly multiples."""
    for number in range(REPEATS):
        schema = {"type": "integer", "multipleOf": 828_257_551 + number}
        await target.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_json": schema})


async def tools(target: Target) -> None:
    """5,000 tools, one of which must be called."""
    parameters = {"type": "object", "properties": {"x": {"type": "string"}}}
    listed = [
        {"type": "function", "function": {"name": f"tool_{i}", "description": "d" * 40, "parameters": parameters}}
        for i in range(5000)
    ]
    body = {"messages": [{"role": "user", "content": "a"}], "tools": listed, "tool_choice": "required"}
    for _ in range(REPEATS):
        assert await target.post("/v1/chat/completions", body) == 400


async def first_grammars(target: Target) -> None:
    """Schemas that were not compiled before, in requests with token healing."""
    for number in range(REPEATS):
        schema = {"type": "object", "properties": {f"p{i}_{number}": {"type": "string"} for i in range(100)}}
        await target.post("/v1/completions", {"prompt": "a", "max_tokens": 4, "guided_json": schema})


async def uploads_over_http(target: Target) -> None:
    """Bodies of 15 MiB that never end."""

    async def one() -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", target.http_port)
        writer.write(b"POST /v1/completions HTTP/1.1\r\nhost: a\r\ncontent-type: application/json\r\n")
        writer.write(b"authorization: %b\r\n" % target.bearer.encode())
        writer.write(b"content-length: %d\r\n\r\n" % (16 * MIB))
        try:
            for _ in range(15):
                writer.write(b" " * MIB)
                await asyncio.wait_for(writer.drain(), 5)
            await asyncio.sleep(5)
        except (TimeoutError, ConnectionError):
            pass
        writer.transport.abort()

    for _ in range(2):
        await asyncio.gather(*(one() for _ in range(48)))


async def uploads_over_grpc(target: Target) -> None:
    """Many concurrent messages of 15 MiB."""
    data = generation_pb2.GenerateRequest(text="a" * (15 * MIB)).SerializeToString()
    for _ in range(2):
        await asyncio.gather(*(target.call("GenerationService/Generate", data) for _ in range(24)))


async def endless_model_files(target: Target) -> None:
    """Draft models whose files are endless, or are links to devices."""
    endless, fifo = target.folder / "endless", target.folder / "fifo"
    endless.mkdir()
    fifo.mkdir()
    (endless / "config.json").symlink_to("/dev/zero")
    os.mkfifo(fifo / "config.json")
    for folder in (endless, fifo):
        data = admin_pb2.SwapDraftRequest(draft=str(folder)).SerializeToString()
        code = await target.call("AdminService/SwapDraft", data)
        assert code == grpc.StatusCode.FAILED_PRECONDITION, f"{folder.name}: {code}"


async def idle_connections(target: Target) -> None:
    """Connections that send nothing."""
    opened = []
    for _ in range(400):
        try:
            opened.append(await asyncio.open_connection("127.0.0.1", target.http_port))
        except OSError:
            break
    await asyncio.sleep(3)
    for _, writer in opened:
        writer.close()


ATTACKS: dict[str, Attack] = {
    "8M stop ids": lists(stopping={"stop_token_ids": Many(8_000_000)}),
    "12M allowed ids": lists(sampling={"allowed_token_ids": Many(12_000_000)}),
    "prompt of 15M ids": lists(token_ids={"ids": Many(15_000_000)}),
    "4M prediction ids, n=8": lists(sampling={"n": 8}, prediction={"token_ids": {"ids": Many(4_000_000)}}),
    "800,000 chat messages": lists(chat={"messages": Many(800_000, {"role": "user", "content": "a"})}),
    "longest lists": longest_lists,
    "grammar bombs": grammar_bombs,
    "schemas": schemas,
    "first grammars": first_grammars,
    "5,000 tools": tools,
    "48 uploads over HTTP": uploads_over_http,
    "24 uploads over gRPC": uploads_over_grpc,
    "endless model files": endless_model_files,
    "400 idle connections": idle_connections,
}
