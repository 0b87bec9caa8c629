"""A model's tokenizer for the event loop: long texts are encoded in threads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from server.admission import Admission
from server.auth.principal import current_caller
from server.errors import ChatNotSupportedError
from server.interfaces import TokenizerLike
from server.large_texts import LARGE_CHARACTERS, LargeTexts, check_length, text_length
from specdec.core.types import EngineInfo
from specdec.errors import EngineDeadError, ModelError

INLINE_CHARACTERS = 4096  # shorter texts are encoded on the event loop, in about a millisecond


class AsyncTokenizer:
    """Encodes and decodes; large texts count against the caller's rate limits. Refuses everything until `load`."""

    def __init__(self, info: Callable[[], EngineInfo], admission: Admission) -> None:
        """info: the engine's description; raises EngineDeadError until it is known."""
        self._info, self._admission = info, admission
        self._loaded: TokenizerLike | None = None
        self._large = LargeTexts()

    def load(self, tokenizer: TokenizerLike) -> None:
        """Use ``tokenizer`` from now on."""
        self._loaded = tokenizer

    def close(self) -> None:
        """End the threads for large texts."""
        self._large.close()

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer can be used."""
        return self._loaded is not None

    @property
    def loaded(self) -> TokenizerLike:
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
            LargeTextQueueFullError: it is large, and too many large texts wait.
        """
        work = partial(self.loaded.encode, text, add_special=add_special, parse_special=parse_special)
        return work() if len(text) <= INLINE_CHARACTERS else await self._encode_in_thread(len(text), work)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation in which ``tools`` may be called; ``add_generation_prompt`` opens the answer.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            ChatNotSupportedError: the model has no usable chat template.
            InvalidRequestError: the template refuses the messages.
            RequestError: as `encode` raises for large texts.
        """
        work = partial(self.loaded.encode_chat, messages, tools=tools, add_generation_prompt=add_generation_prompt)
        try:
            return await self._encode_in_thread(text_length([messages, tools]), work)
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
        check_length(characters, self.loaded.longest_token, self._info().max_context)
        self._admission.check_rate(current_caller())
        return await self._large.run(characters, work)
