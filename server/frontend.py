"""What every protocol of the server shares: engine client, tokenizer, admission, experiments, drain gate."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from server.admission import Admission
from server.auth.access import Access
from server.auth.principal import current_caller
from server.engine_client import EngineClient, EngineState
from server.errors import ChatNotSupportedError, DrainingError, UnknownModelError
from server.experiment.live.experiments import Experiments
from server.fim import FillMode, FimEncoder, FimNotSupportedError, Gap, PackedPrompt
from server.interfaces import TokenizerLike
from server.large_texts import LARGE_CHARACTERS, LargeTexts, check_length, text_length
from server.model_names import ModelNames
from specdec.config import ServerConfig
from specdec.core.types import EngineInfo
from specdec.errors import EngineDeadError, ModelError


class DrainGate:
    """Every call that generates passes through `enter`."""

    def __init__(self) -> None:
        self._inside = 0
        self._closed = False
        self._empty = asyncio.Event()
        self._empty.set()

    @property
    def is_closed(self) -> bool:
        """Whether a shutdown has begun."""
        return self._closed

    @property
    def inside(self) -> int:
        """How many are inside."""
        return self._inside

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Be inside for the length of the block.

        Raises:
            DrainingError: the gate is closed.
        """
        if self._closed:
            raise DrainingError
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    async def drain(self, timeout_s: float) -> int:
        """Close, wait up to ``timeout_s`` seconds until nobody is inside, and return how many still are."""
        self._closed = True
        try:
            await asyncio.wait_for(self._empty.wait(), timeout_s)
        except TimeoutError:
            return self._inside
        return 0


_INLINE_CHARACTERS = 4096


class Frontend:
    """Made before the model is there: until `tokenizer` is set, whatever needs it is refused as loading; ``fim`` is set
    together with it. ``config`` None: open to anybody, with the default limits. ``names``: other names of the model.
    ``beside``: the front end of another model of the same server, with which keys and their limits are shared.

    Raises:
        ConfigError: a file of keys or certificates can not be read or used.
    """

    def __init__(
        self,
        client: EngineClient,
        config: ServerConfig | None = None,
        names: ModelNames | None = None,
        beside: Frontend | None = None,
    ) -> None:
        self.client, self.names = client, names or ModelNames()
        self.access: Access = beside.access if beside else Access(config or ServerConfig())
        self.admission: Admission = Admission(
            client, config or ServerConfig(), beside=beside.admission if beside else None
        )
        self.experiments = Experiments(
            (config or ServerConfig()).experiments,
            client,
            self.admission,
            lambda ids: self.loaded_tokenizer.decode(ids),
        )
        self.hold_headers = (config or ServerConfig()).hold_headers
        self.gate = DrainGate()
        self.tokenizer: TokenizerLike | None = None
        self.fim: FimEncoder | None = None
        self._large = LargeTexts()

    def close(self) -> None:
        """Encode nothing any more."""
        self._large.close()

    @property
    def info(self) -> EngineInfo:
        """What the engine is.

        Raises:
            EngineDeadError: it is not known yet.
        """
        return self.client.info

    @property
    def model(self) -> str:
        """What the model is called in answers.

        Raises:
            EngineDeadError: it is not known yet.
        """
        return self.names.own or self.info.target

    def is_called(self, asked: str) -> bool:
        """Whether ``asked`` is a name of the model, as far as they are known yet."""
        return self.names.include(asked, self.client.info.target if self.client.is_known else "")

    def check_model(self, asked: str | None) -> None:
        """Refuse a name that is not the model's; none is fine.

        Raises:
            UnknownModelError: it is another.
            EngineDeadError: it is not known yet which is served.
        """
        target = self.info.target
        if asked and not self.names.include(asked, target):
            raise UnknownModelError(asked[:200], *(self.names.all_own or (target,)))

    @property
    def is_loaded(self) -> bool:
        """Whether the tokenizer is there."""
        return self.tokenizer is not None

    @property
    def takes_requests(self) -> bool:
        """Whether a request would be taken now."""
        return self.client.state == EngineState.READY and self.is_loaded and not self.gate.is_closed

    @property
    def fills_in(self) -> bool:
        """Whether the model can fill in the middle of a text.

        Raises:
            EngineDeadError: it is not loaded yet.
        """
        _, fim = self.loaded_tokenizer, self.fim
        return fim is not None and fim.fills_in

    @property
    def loaded_tokenizer(self) -> TokenizerLike:
        """The tokenizer.

        Raises:
            EngineDeadError: it is not loaded yet.
        """
        if self.tokenizer is None:
            raise EngineDeadError("the engine is loading; retry shortly")
        return self.tokenizer

    async def encode(self, text: str, *, add_special: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids of ``text``; a long one is encoded in a thread, so that others' streams go on.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            TextTooLongError: no prompt can hold it.
            RateLimitedError: it is large, and the caller's key has used up a limit.
            LargeTextQueueFullError: it is large, and too many such wait.
        """
        work = partial(self.loaded_tokenizer.encode, text, add_special=add_special, parse_special=parse_special)
        return work() if len(text) <= _INLINE_CHARACTERS else await self._encode_beside(len(text), work)

    async def _encode_beside(self, characters: int, work: Callable[[], list[int]]) -> list[int]:
        """What ``work`` makes of so many characters, in a thread."""
        if characters <= LARGE_CHARACTERS:
            return await asyncio.to_thread(work)
        check_length(characters, self.loaded_tokenizer.longest_token, self.info.max_context)
        self.admission.check_rate(current_caller())
        return await self._large.run(characters, work)

    async def encode_fim(self, prefix: str, suffix: str) -> list[int]:
        """Token ids of a prompt that asks for what is missing between two texts; raises as `pack_fim`."""
        return list((await self.pack_fim(prefix, suffix)).ids)

    async def pack_fim(self, prefix: str, suffix: str, max_tokens: int = 1) -> PackedPrompt:
        """A prompt that asks for what is missing between two texts, as much of both as leaves room for ``max_tokens``;
        nothing is left to be spelled again.

        Raises:
            FimNotSupportedError: the model can not fill in.
            EngineDeadError: it is not loaded yet.
        """
        _, fim = self.loaded_tokenizer, self.fim
        if fim is None:
            raise FimNotSupportedError(
                "filling in the middle is not available here; leave out suffix, and send what stands before the gap"
            )
        gap, owner = Gap(prefix, suffix, head_from=len(prefix)), current_caller().tenant
        budget = fim.budget(self.info.max_context, max_tokens)
        if len(prefix) + len(suffix) <= _INLINE_CHARACTERS:
            return fim.pack(gap, FillMode.MIDDLE, budget, owner, heal=False)
        return await asyncio.to_thread(fim.pack, gap, FillMode.MIDDLE, budget, owner, heal=False)

    async def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
    ) -> list[int]:
        """Token ids of a conversation, up to the answer's beginning unless not ``add_generation_prompt``; ``tools`` are
        those that may be called in it.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
            ChatNotSupportedError: the model has no usable chat template.
            InvalidRequestError: the template refuses the messages.
            RequestError: as `encode` raises for large texts.
        """
        work = partial(
            self.loaded_tokenizer.encode_chat, messages, tools=tools, add_generation_prompt=add_generation_prompt
        )
        try:
            return await self._encode_beside(text_length([messages, tools]), work)
        except ModelError as error:
            raise ChatNotSupportedError(str(error)) from None

    async def decode(self, ids: Sequence[int], *, skip_special: bool = True) -> str:
        """Text of ``ids``.

        Raises:
            EngineDeadError: the tokenizer is not loaded yet.
        """
        tokenizer = self.loaded_tokenizer
        if len(ids) <= _INLINE_CHARACTERS:
            return tokenizer.decode(ids, skip_special=skip_special)
        return await asyncio.to_thread(tokenizer.decode, ids, skip_special=skip_special)
