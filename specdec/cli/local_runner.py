"""Runs one request on an engine in this process."""

from __future__ import annotations

import dataclasses
from collections.abc import Generator

from server.engine_protocol import EngineLike
from server.request_errors import DeadlinePassedError, GenerationFailedError
from server.tokenizer_protocol import TokenizerLike
from specdec.cli.ask import Ask
from specdec.types import Failed, Finished, FinishReason, RequestEvent


class LocalRunner:
    """``events`` yields what the engine says; leaving it early aborts the request."""

    def __init__(self, engine: EngineLike, tokenizer: TokenizerLike) -> None:
        self._engine, self._tokenizer = engine, tokenizer

    @property
    def model(self) -> str:
        """The target's name."""
        return self._engine.info().target

    def events(self, ask: Ask) -> Generator[RequestEvent, None, None]:
        """Everything about one request, in order.

        Raises:
            RequestError: it is refused, or fails.
        """
        if ask.chat:
            ids = self._tokenizer.encode_chat([{"role": "user", "content": ask.prompt}])
        else:
            ids = self._tokenizer.encode(ask.prompt)
        prediction = self._tokenizer.encode(ask.prediction, add_special=False)
        request = dataclasses.replace(ask.request, prompt_ids=tuple(ids), prediction_ids=tuple(prediction))
        self._engine.submit(request)
        try:
            while self._engine.has_work():
                for event in self._engine.step():
                    if isinstance(event, Failed):
                        raise GenerationFailedError(event.reason, event.message)
                    if isinstance(event, Finished) and event.reason == FinishReason.DEADLINE:
                        raise DeadlinePassedError
                    yield event
        finally:
            self._engine.abort(ask.request.request_id)  # does nothing to one that is complete
