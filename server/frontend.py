"""What every face of the server shares: the engine's client, the tokenizer, the gate."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence

from server.drain_gate import DrainGate
from server.engine_client import EngineClient
from server.request_errors import ChatNotSupportedError
from server.tokenizer_protocol import TokenizerLike
from specdec.errors import EngineDeadError, ModelError
from specdec.types import EngineInfo

_INLINE_CHARACTERS = 4096


class Frontend:
    """Made before the model is there: until `tokenizer` is set, whatever needs it is refused as loading."""

    def __init__(self, client: EngineClient) -> None:
        self.client = client
        self.gate = DrainGate()
        self.tokenizer: TokenizerLike | None = None

    @property
    def info(self) -> EngineInfo:
        """What the engine is.

        Raises:
            EngineDeadError: it is not known yet.
        """
        return self.client.info

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``; a long one is encoded in a thread, so that others' streams go on.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
        """
        tokenizer = self._loaded()
        if len(text) <= _INLINE_CHARACTERS:
            return tokenizer.encode(text, add_special=add_special, parse_special=parse_special)
        return await asyncio.to_thread(tokenizer.encode, text, add_special=add_special, parse_special=parse_special)

    async def encode_chat(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Token ids of a conversation up to the answer's beginning.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            ChatNotSupportedError: the model has no usable chat template.
            InvalidRequestError: the template refuses the messages.
        """
        tokenizer = self._loaded()
        try:
            return await asyncio.to_thread(tokenizer.encode_chat, messages)
        except ModelError as error:
            raise ChatNotSupportedError(str(error)) from None

    async def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
        """
        tokenizer = self._loaded()
        if len(ids) <= _INLINE_CHARACTERS:
            return tokenizer.decode(ids, skip_special=skip_special)
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special=skip_special)

    def _loaded(self) -> TokenizerLike:
        if self.tokenizer is None:
            raise EngineDeadError("the engine is loading; retry shortly")
        return self.tokenizer
