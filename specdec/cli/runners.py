"""Where `specdec generate` and `specdec chat` run requests: on an engine in this process, or on a server."""

from __future__ import annotations

import asyncio
import dataclasses
import signal
from collections.abc import AsyncGenerator, Generator, Sequence
from contextlib import closing
from typing import TYPE_CHECKING

from server.errors import DeadlinePassedError, unpack_error
from specdec.cli.options import CONNECT_S
from specdec.client.client import Client
from specdec.client.connection import Credentials, RetryPolicy
from specdec.client.prompt import ChatTurn, GenerateOptions
from specdec.core.types import Failed, Finished, FinishReason, Request, RequestEvent

if TYPE_CHECKING:
    from specdec.engine.engine import Engine  # with torch, which a server's clients do without
    from specdec.models.tokenizer import Tokenizer


class LocalRunner:
    """Runs a request on an engine in this process. Closing ``events`` early aborts the request."""

    def __init__(self, engine: Engine, tokenizer: Tokenizer) -> None:
        self._engine, self._tokenizer = engine, tokenizer
        self.model = engine.info().target

    def events(
        self, prompt: str | Sequence[ChatTurn], request: Request, prediction: str = ""
    ) -> Generator[RequestEvent, None, None]:
        """Everything about one request, in order.

        prompt: a text, or the messages of a conversation. request: the rest, without token ids. prediction: the
        expected output; empty: none.

        Raises:
            RequestError: it is refused, or fails.
            KeyboardInterrupt: SIGINT arrived, and the step was finished.
        """
        if isinstance(prompt, str):
            ids = self._tokenizer.encode(prompt)
        else:
            ids = self._tokenizer.encode_chat([dataclasses.asdict(turn) for turn in prompt])
        expected = self._tokenizer.encode(prediction, add_special=False)
        self._engine.submit(dataclasses.replace(request, prompt_ids=tuple(ids), prediction_ids=tuple(expected)))
        interrupted: list[int] = []
        # An exception inside a step would leave the engine's state half changed.
        before = signal.signal(signal.SIGINT, lambda number, _: interrupted.append(number))
        try:
            while self._engine.has_work():
                if interrupted:
                    raise KeyboardInterrupt
                for event in self._engine.step():
                    if isinstance(event, Failed):
                        raise unpack_error((event.reason, event.message, event.details))
                    if isinstance(event, Finished) and event.reason == FinishReason.DEADLINE:
                        raise DeadlinePassedError
                    yield event
        finally:
            signal.signal(signal.SIGINT, before)
            self._engine.abort(request.request_id)  # no-op for a complete request


class RemoteRunner:
    """Use as a context manager; leaving ``events`` early cancels the call. ``CallError`` where a server refuses, fails,
    or cannot be reached. ``model``: the name of one of several that the server has.

    Raises:
        ConfigError: a file of the credentials cannot be read.
    """

    def __init__(self, address: str, credentials: Credentials, model: str = "") -> None:
        retry = RetryPolicy(unreachable=False)  # as of `asks_server`
        self._client, self._model = Client(address, credentials, retry), model
        self._runner = asyncio.Runner()

    def __enter__(self) -> RemoteRunner:
        return self

    def __exit__(self, *_: object) -> None:
        with closing(self._runner):
            self._runner.run(self._client.close())

    @property
    def model(self) -> str:
        """The target's name."""
        return self._runner.run(self._client.info(CONNECT_S, model=self._model)).target

    def events(
        self, prompt: str | Sequence[ChatTurn], request: Request, prediction: str = ""
    ) -> Generator[RequestEvent, None, None]:
        """As `LocalRunner.events`."""
        stream = self._client.stream(prompt, **_options(request, prediction, self._model))
        try:
            while (event := self._runner.run(_next(stream))) is not None:
                yield event
        finally:
            self._runner.run(stream.aclose())


Runner = LocalRunner | RemoteRunner


async def _next(stream: AsyncGenerator[RequestEvent, None]) -> RequestEvent | None:
    return await anext(stream, None)


def _options(r: Request, prediction: str, model: str) -> GenerateOptions:
    return GenerateOptions(
        request_id=r.request_id, sampling=r.sampling, stopping=r.stopping, output=r.output, speculation=r.speculation,
        grammar=r.grammar, prediction=prediction, session=r.session, cache_salt=r.cache_salt,
        priority=r.priority, target_tpot_ms=r.target_tpot_ms, timeout_s=r.deadline_s, model=model,
    )  # fmt: skip
