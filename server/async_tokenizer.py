"""A model's tokenizer for the event loop: threads encode long texts, large ones one at a time with low priority."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from server.admission import Admission
from server.auth.principal import current_caller
from server.errors import ChatNotSupportedError
from specdec.core.types import EngineInfo
from specdec.errors import (
    LONGEST_HINT_S,
    EngineDeadError,
    InvalidRequestError,
    ModelError,
    PromptTooLongError,
    QueueFullError,
)
from specdec.models.tokenizer import Tokenizer

LARGE_CHARACTERS = 1 << 14  # encoding takes about 10 ms
MOST_CHARACTERS = 1 << 26  # of all waiting texts; encoding takes about 40 s
CHARACTERS_PER_S = MOST_CHARACTERS / 40  # that are encoded
_NICENESS = 10


class TextTooLongError(PromptTooLongError):
    """A text too long for any prompt. ``got`` is the least number of tokens that it can have."""

    def __init__(self, limit: int, got: int) -> None:
        super().__init__(limit, got)
        self.args = (f"prompt has at least {got} tokens, the limit is {limit}; shorten the prompt",)


def text_length(value: Any) -> int:
    """Characters of all strings in a JSON value."""
    total, left = 0, [value]
    while left:
        item = left.pop()
        if isinstance(item, str):
            total += len(item)
        elif isinstance(item, Mapping):
            left += item.values()
        elif isinstance(item, list | tuple):
            left += item
    return total


INLINE_CHARACTERS = 4096  # shorter texts are encoded on the event loop, in about a millisecond


class AsyncTokenizer:
    """Encodes and decodes; large texts count against the caller's rate limits. The tokenizer must release the
    interpreter's lock. Refuses everything until `load`. Belongs to one event loop."""

    def __init__(self, info: Callable[[], EngineInfo], admission: Admission) -> None:
        """info: the engine's description; raises EngineDeadError until it is known."""
        self._info, self._admission = info, admission
        self._loaded: Tokenizer | None = None
        # Its thread begins with the first text. Each thread has a priority of its own, which `nice` only lowers: a
        # process may not raise it.
        self._pool = ThreadPoolExecutor(1, "large-text", os.nice, (_NICENESS,))
        self._characters = 0  # of the large texts that wait, and of the one that is encoded

    def load(self, tokenizer: Tokenizer) -> None:
        """Use ``tokenizer`` from now on."""
        self._loaded = tokenizer

    def close(self) -> None:
        """Encode no further large text."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer can be used."""
        return self._loaded is not None

    @property
    def loaded(self) -> Tokenizer:
        """The tokenizer itself.

        Raises:
            EngineDeadError: it is not loaded yet.
        """
        if self._loaded is None:
            raise EngineDeadError("the engine is loading; retry shortly")
        return self._loaded

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            TextTooLongError: no prompt can hold it.
            RateLimitedError: it is large, and the caller's key has used up a limit.
            QueueFullError: it is large, and too many large texts wait.
        """
        work = partial(self.loaded.encode, text, add_special=add_special, parse_special=parse_special)
        return work() if len(text) <= INLINE_CHARACTERS else await self._encode_in_thread(len(text), work)

    async def encode_prediction(self, text: str) -> tuple[int, ...]:
        """Token ids of a predicted output.

        Raises:
            InvalidRequestError: no answer can hold it.
            RequestError: as `encode` raises for others.
        """
        try:
            return tuple(await self.encode(text, add_special=False))
        except TextTooLongError as error:
            problem = f"has at least {error.got} tokens, an answer at most {error.limit}; shorten it"
            raise InvalidRequestError.of("prediction", problem) from None

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids of a conversation in which ``tools`` may be called; ``variables``: as in `ChatTemplate.render`.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            ChatNotSupportedError: the model has no usable chat template.
            InvalidRequestError: the template refuses the messages.
            RequestError: as `encode` raises for large texts.
        """
        work = partial(self.loaded.encode_chat, messages, tools=tools, variables=variables)
        try:
            return await self._encode_in_thread(text_length([messages, tools, variables]), work)
        except ModelError as error:
            raise ChatNotSupportedError(str(error)) from None

    async def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
        """
        tokenizer = self.loaded
        if len(ids) <= INLINE_CHARACTERS:
            return tokenizer.decode(ids, skip_special=skip_special)
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special=skip_special)

    async def _encode_in_thread(self, characters: int, work: Callable[[], list[int]]) -> list[int]:
        """Run ``work``, which encodes ``characters`` characters."""
        if characters <= LARGE_CHARACTERS:
            return await asyncio.to_thread(work)
        least, limit = -(-characters // max(1, self.loaded.longest_token)), self._info().max_context - 1
        if least > limit:
            raise TextTooLongError(limit, least)
        self._admission.check_rate(current_caller())
        if self._characters and self._characters + characters > MOST_CHARACTERS:
            waiting = "characters of large texts to be turned into tokens"
            retry_s = min(self._characters / CHARACTERS_PER_S, LONGEST_HINT_S)  # there is room after each text
            raise QueueFullError(self._characters, retry_s, waiting)
        self._characters += characters
        try:  # a text whose caller has left is skipped
            return await asyncio.get_running_loop().run_in_executor(self._pool, work)
        finally:
            self._characters -= characters
