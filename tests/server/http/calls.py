"""Calls without a socket: what a dialect's reader returns for a body."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, TypeVar, cast

from starlette.types import Message, Receive

from server.completion.documents import ContextFile, FillMode, Gap
from server.completion.prompt_packer import PackedFiles, PackedPrompt
from server.engine_client import EngineClient
from server.http.call import Call, ServerContext
from server.served_model import Models, ServedModel
from specdec.config import EngineConfig
from specdec.errors import FieldViolation, InvalidRequestError
from tests.fake_engine import INFO
from tests.server.completion.code_tokenizer import CodeTokenizer
from tests.server.fake_tokenizer import FakeTokenizer

Found = TypeVar("Found")


class Fim:
    """Puts 1, 2 and 3 around the texts; 7 ends the generated middle."""

    fills_in, max_context = True, 64

    def is_quick(self, gap: Gap, owner: str = "") -> bool:
        return True

    def encode_text(self, text: str, owner: str = "") -> tuple[int, ...]:
        return tuple(text.encode())

    def pack_files(
        self, files: Sequence[ContextFile], mark: tuple[int, ...], room: int, owner: str = ""
    ) -> PackedFiles:
        return PackedFiles([], [])

    def omitted(self, gap: Gap, packed: PackedPrompt) -> tuple[int, ...]:
        return 0, 0, 0, 0

    def omitted_lines(self, files: Sequence[ContextFile], texts: Sequence[Sequence[int]]) -> int:
        return 0

    def budget(self, wanted: int | None, max_tokens: int) -> int:
        return 64

    def pack(self, gap: Gap, mode: FillMode, budget: int, owner: str = "", *, heal: bool = True) -> PackedPrompt:
        return PackedPrompt((1, *gap.prefix.encode(), 2, *gap.suffix.encode(), 3), (7,))


class Told(FakeTokenizer):
    """Records the last text that it encoded."""

    def __init__(self) -> None:
        super().__init__(has_tools=True)
        self.messages: list[Any] = []
        self.tools: Any = None

    def encode_chat(self, messages: Any, **options: Any) -> list[int]:
        self.messages, self.tools = list(messages), options.get("tools")
        return super().encode_chat(messages, **options)


def make_context(tokenizer: FakeTokenizer | None = None, fim: Any = None, limit: int = 1 << 20) -> ServerContext:
    """A server whose engine is known but not running."""
    return ServerContext(Models([make_model(tokenizer, fim)]), limit)


def make_model(tokenizer: FakeTokenizer | None = None, fim: Any = None) -> ServedModel:
    """A model whose engine is known but not running."""
    info = replace(INFO, indexes=("mine",))
    model = ServedModel(
        cast(
            EngineClient,
            SimpleNamespace(
                info=info,
                engine=SimpleNamespace(info=info, is_known=True, config=EngineConfig(target="m")),
                file_errors=Counter(),
            ),
        )
    )
    model.load(tokenizer or FakeTokenizer(has_tools=True), fim)
    return model


def code_context() -> ServerContext:
    """A server whose model supports fill-in-the-middle."""
    server: Any = make_context(CodeTokenizer())  # type: ignore[arg-type]
    model = server.models.first
    model.client.info = replace(model.info, vocab_size=300)
    return cast(ServerContext, server)


def receiving(*messages: Message) -> Receive:
    """An ASGI ``receive`` that gives ``messages``, and then nothing for ever."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return receive


async def ignored(message: Message) -> None:
    """An ASGI ``send``."""


def make_call(data: bytes, headers: dict[str, str] | None = None, server: ServerContext | None = None) -> Call:
    """A call with a body."""
    scope = {"headers": [(k.encode(), v.encode()) for k, v in (headers or {}).items()], "query_string": b""}
    return Call(scope, receiving({"type": "http.request", "body": data}), ignored, server or make_context())


def asked(
    reader: Callable[[Call], Awaitable[Found]],
    body: Any,
    headers: dict[str, str] | None = None,
    server: ServerContext | None = None,
) -> Found:
    """Return what ``reader`` returns for ``body``."""

    async def read() -> Found:
        call = make_call(json.dumps(body).encode(), headers, server)
        await call.read()
        return await reader(call)

    return asyncio.run(read())


def violations(reader: Callable[[Call], Awaitable[Any]], body: Any) -> list[FieldViolation]:
    """Return the errors of ``reader``."""
    try:
        asked(reader, body)
    except InvalidRequestError as error:
        return error.violations
    return []
